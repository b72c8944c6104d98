// quern_manifest.json: what a finished output is and what was done to each tensor. A pure function of the job's inputs: it holds no times,
// hosts or paths of the machine. docs/formats.md describes the file.
#ifndef QUERN_DAEMON_MANIFEST_MANIFEST_H_
#define QUERN_DAEMON_MANIFEST_MANIFEST_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

inline constexpr char kManifestName[] = "quern_manifest.json";

struct ManifestFile {
  std::string name;  // relative to the output
  uint64_t size = 0;
  std::string sha256;  // raw
};

// Where plain values stand in a tensor that holds those of several modules: strides in bytes, `offset` from the tensor's start.
struct ManifestStack {
  std::string tensor;
  uint64_t offset = 0;
  uint64_t row_stride = 0;
  uint64_t col_stride = 0;
};

struct ManifestModule {
  std::string module;
  std::string scheme;  // canonical text
  std::string source_tensor;
  std::string source_file;  // name in the source directory
  std::string source_dtype;
  std::vector<uint64_t> source_shape;
  std::string source_digest;  // raw XXH3-128
  std::string shard;          // file name in the output
  std::string role;
  std::string reason;
  std::optional<ManifestStack> stack;  // absent: its tensors are its own, "<module>.weight" and so on
  quern::v1::ModuleError error;
};

struct ManifestCopy {
  std::string tensor;
  std::string source_file;
  std::string source_digest;  // raw XXH3-128
  std::string shard;
  std::string role;
  std::string reason;
};

struct ManifestDropped {
  std::string tensor;
  std::string reason;
};

struct Manifest {
  uint64_t format_version = 1;
  uint64_t numerics_version = 0;
  std::string recipe;         // YAML; empty for plain weights
  std::string export_format;  // "compressed-tensors", "modelopt", or "plain"
  uint64_t max_shard_size = 0;
  std::vector<ManifestFile> source_files;  // name, size, and sha256 of the header
  std::vector<ManifestFile> inputs;        // files of activation scales and importance: name, size, and sha256 of the content
  std::vector<ManifestFile> files;         // of the output, all but the manifest itself
  std::vector<ManifestModule> modules;
  std::vector<ManifestCopy> copied;
  std::vector<ManifestDropped> dropped;
};

// Deterministic text, newline at the end, every entry of a list on a line of its own. Doubles are written so that they read back exactly;
// those that JSON cannot write are the strings "inf", "-inf" and "nan".
std::string ManifestToJson(const Manifest& manifest);

// The text of ManifestToJson piece by piece, so that a large manifest is never in memory as a whole. Begin, then the modules, the copied
// and the dropped tensors, in this order, then Finish; an entry of an earlier list is FAILED_PRECONDITION. Errors of the sink are returned
// as they are.
class ManifestWriter {
 public:
  using Sink = std::function<absl::Status(absl::string_view)>;
  explicit ManifestWriter(Sink sink) : sink_(std::move(sink)) {}

  // Everything but the three lists of tensors, which are not looked at.
  absl::Status Begin(const Manifest& head);
  absl::Status Add(const ManifestModule& module);
  absl::Status Add(const ManifestCopy& copy);
  absl::Status Add(const ManifestDropped& dropped);
  absl::Status Finish();

 private:
  absl::Status AddTo(int list, std::string entry);
  absl::Status OpenList(int list);

  Sink sink_;
  int list_ = -1;      // the one that is open
  bool first_ = true;  // no entry in it yet
};

// DATA_LOSS names what is missing or of another type, and file names that lead out of the directory. FAILED_PRECONDITION for a newer
// format_version.
absl::StatusOr<Manifest> ParseManifest(absl::string_view json, absl::string_view path);
// Only Manifest::files, in the memory that they take. Same errors.
absl::StatusOr<std::vector<ManifestFile>> ParseManifestFiles(absl::string_view json, absl::string_view path);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_MANIFEST_MANIFEST_H_
