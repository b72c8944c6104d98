// Files by their names in a directory that is held open, rather than by paths.
#ifndef QUERN_BASE_HELD_DIRECTORY_H_
#define QUERN_BASE_HELD_DIRECTORY_H_

#include <sys/types.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"

namespace quern {

// A directory that is opened once: it stays the same one when names above it change. No link is followed in it. Thread-safe.
class HeldDirectory {
 public:
  static absl::StatusOr<HeldDirectory> Open(const std::string& path);
  // As the functions of these names in base/file.h. `name` has no '/'.
  absl::StatusOr<UniqueFd> OpenFile(const std::string& name, int flags, mode_t mode = 0644) const;
  absl::Status RemoveFile(const std::string& name) const;
  absl::Status Sync() const;

 private:
  HeldDirectory(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  std::string path_;
  UniqueFd fd_;
};

// The end of OpenFile: `file` was opened with `flags` and O_NONBLOCK, or errno tells why not. Only a regular file passes, and O_NONBLOCK
// goes again.
absl::StatusOr<UniqueFd> TakeRegular(UniqueFd file, int flags, const std::string& path);
// fsync of an open directory.
absl::Status SyncOpenDirectory(int fd, const std::string& path);

}  // namespace quern

#endif  // QUERN_BASE_HELD_DIRECTORY_H_
