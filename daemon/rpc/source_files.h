// The files that one task reads, as they are served to a worker that does not see them.
#ifndef QUERN_DAEMON_RPC_SOURCE_FILES_H_
#define QUERN_DAEMON_RPC_SOURCE_FILES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// Not thread-safe. All methods block on the filesystem. PERMISSION_DENIED for a path that the task does not name; FAILED_PRECONDITION with
// the reason SOURCE_CHANGED for a file that is not the one that was planned; NOT_FOUND for one that is gone.
class SourceFiles {
 public:
  using Resolve = std::function<absl::StatusOr<std::string>(const std::string& path)>;
  // `resolve` says where a path leads and whether that may be read.
  SourceFiles(const quern::v1::TaskSpec& task, Resolve resolve);

  // Looks at the file by its name, and at its whole header if asked to. Its size.
  absl::StatusOr<uint64_t> Check(const std::string& path, bool header);
  // OK if the task names it. Does not block.
  absl::Status CheckNamed(const std::string& path) { return Find(path).status(); }
  // Reads a range of a file that stays open from then on. OUT_OF_RANGE behind its end.
  absl::Status Read(const std::string& path, uint64_t offset, uint64_t size, char* out);

 private:
  struct File {
    quern::v1::SourceFile planned;
    bool known = false;  // false: the task is to find out what the file is; `planned` has its path only
    UniqueFd fd;         // once it was read
  };

  absl::StatusOr<File*> Find(const std::string& path);
  absl::StatusOr<UniqueFd> Open(const File& file) const;
  // The size, if the open file is the one that was planned.
  static absl::StatusOr<uint64_t> CheckIdentity(const File& file, int fd);

  const Resolve resolve_;
  std::map<std::string, File> files_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_SOURCE_FILES_H_
