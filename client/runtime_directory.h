// The directory of a running command for its socket and the logs of its children.
#ifndef QUERN_CLIENT_RUNTIME_DIRECTORY_H_
#define QUERN_CLIENT_RUNTIME_DIRECTORY_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/file.h"

namespace quern::client {

// $XDG_RUNTIME_DIR where it is a directory that leaves room for the name of a socket (108 bytes with the final NUL), else /tmp.
std::string RuntimeBase();

// A new directory, mode 0700, removed with its content by the destructor. A lock in it tells that its command lives: Make removes those
// that commands of this user left behind when they were killed.
class RuntimeDirectory {
 public:
  static absl::StatusOr<RuntimeDirectory> Make(const std::string& base);
  RuntimeDirectory(RuntimeDirectory&& other) noexcept : path_(std::exchange(other.path_, "")), lock_(std::move(other.lock_)) {}
  RuntimeDirectory& operator=(RuntimeDirectory&&) = delete;
  ~RuntimeDirectory();

  const std::string& path() const { return path_; }

 private:
  RuntimeDirectory(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  std::string path_;
  UniqueFd lock_;
};

}  // namespace quern::client

#endif  // QUERN_CLIENT_RUNTIME_DIRECTORY_H_
