// Options that several commands share, and the requests that they make.
#ifndef QUERN_CLIENT_JOB_OPTIONS_H_
#define QUERN_CLIENT_JOB_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/v1/jobs.pb.h"

namespace CLI {
class App;
}

namespace quern::client {

// "a,b" is two patterns. From "re:" on the text is one pattern, since commas are part of regular expressions.
std::vector<std::string> SplitPatterns(const std::vector<std::string>& values);

// What the private worker of a command may use. Errors are UsageErrors.
struct WorkerOptions {
  std::string memory = "512MiB";
  uint32_t threads = 0;  // 0: as many as there are CPUs
  std::string reader = "auto";

  void AddTo(CLI::App& app);
  absl::StatusOr<uint64_t> MemoryBytes() const;
};

// What is to be quantized, and how.
struct QuantizeOptions {
  std::string source;
  std::string scheme;
  std::string group_size;
  std::vector<std::string> targets;
  std::vector<std::string> ignore;
  std::string observer;
  std::string recipe_file;
  std::string export_format = "compressed-tensors";
  std::string activation_scales;
  std::string importance;
  bool allow_requantize = false;
  std::string max_shard_size = "2GiB";
  bool overwrite = false;
  bool verify_source = false;

  // `output`: also the options that only matter when something is written.
  void AddTo(CLI::App& app, bool output);
  // Whether any option says what is quantized or how.
  bool SaysHow() const;
  // Reads the recipe file. `remote`: the coordinator may run on another machine. Leaves output, memory and reader empty.
  absl::StatusOr<quern::v1::QuantizeSpec> ToSpec(bool remote) const;
};

// Which checkpoint is made plain again, and how.
struct DequantizeOptions {
  std::string source;
  std::string dtype = "bf16";
  std::string max_shard_size = "2GiB";
  bool overwrite = false;
  bool verify_source = false;

  void AddTo(CLI::App& app);
  // As QuantizeOptions::ToSpec.
  absl::StatusOr<quern::v1::DequantizeSpec> ToSpec(bool remote) const;
};

// Sizes on the command line: UsageError names the option.
absl::StatusOr<uint64_t> ParseSizeOption(absl::string_view option, absl::string_view text);

// "1%" or "0.01" -> 0.01; a UsageError that names `flag` for anything that is not 0 to 1.
absl::StatusOr<double> ParseFraction(const std::string& flag, const std::string& text);

}  // namespace quern::client

#endif  // QUERN_CLIENT_JOB_OPTIONS_H_
