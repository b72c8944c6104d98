// POSIX files with errno turned into Status once: each message names the call and the path. ENOSPC and EDQUOT become
// RESOURCE_EXHAUSTED with "disk full", ENOENT NOT_FOUND, EEXIST ALREADY_EXISTS, EACCES and EPERM PERMISSION_DENIED, others
// UNAVAILABLE (EIO, ESTALE: DATA_LOSS).
#ifndef QUERN_BASE_FILE_H_
#define QUERN_BASE_FILE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern {

// Status of a failed system call: "<call> <path>: <strerror>".
absl::Status ErrnoToStatus(int error, absl::string_view call, absl::string_view path);

// Owns a file descriptor. Moves only.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { Reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  // Closes and drops the error: for descriptors that were only read. Writers call Close.
  void Reset();
  // Closes and reports the error.
  absl::Status Close(absl::string_view path);

 private:
  int fd_ = -1;
};

// open(2) with O_CLOEXEC added. Without O_DIRECTORY or O_PATH only a regular file opens (those of /proc and /sys are such): a directory,
// FIFO, socket or device is INVALID_ARGUMENT ("<path> is no regular file"), at once, whoever made it and whether or not its other end is
// there.
absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags, mode_t mode = 0644);

// Reads exactly `size` bytes at `offset`, across short reads. A file that ends before is DATA_LOSS ("file ended at ...").
absl::Status ReadExactly(int fd, uint64_t offset, void* data, size_t size, absl::string_view path);
// Writes all, across short writes.
absl::Status WriteExactly(int fd, uint64_t offset, const void* data, size_t size, absl::string_view path);

// The content of a file of at most `limit` bytes; a larger one is RESOURCE_EXHAUSTED and is not read.
absl::StatusOr<std::string> ReadFileToString(const std::string& path, uint64_t limit = uint64_t{1} << 30);

// The same for a file that the kernel makes up as it is read (/proc, cgroups): such files do not know their size.
absl::StatusOr<std::string> ReadKernelFile(const std::string& path, uint64_t limit = uint64_t{1} << 20);

// Durable and atomic: writes `path`.tmp, fsyncs it, renames it over `path`, fsyncs the directory. Blocks.
absl::Status WriteFileDurably(const std::string& path, absl::string_view content);

// fsync of a directory, so that names made or removed in it survive a crash.
absl::Status SyncDirectory(const std::string& directory);

// rename(2), without syncing either directory.
absl::Status RenameFile(const std::string& from, const std::string& to);
// unlink(2); a file that is not there is no error.
absl::Status RemoveFile(const std::string& path);
// mkdir -p; existing directories are fine.
absl::Status MakeDirectories(const std::string& path, mode_t mode = 0755);
// rm -r; what is not there is no error. Does not follow links.
absl::Status RemoveTree(const std::string& path);
// Names in a directory without "." and "..", sorted.
absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path);

bool FileExists(const std::string& path);
absl::StatusOr<uint64_t> FileSize(const std::string& path);
// Free bytes of the filesystem of an existing path, for an ordinary user.
absl::StatusOr<uint64_t> FreeDiskSpace(const std::string& path);
// "a/b" from "a", "b"; an absolute `name` is not special.
std::string JoinPath(absl::string_view directory, absl::string_view name);
// Everything before the last '/', "." when there is none; and everything after it.
std::string DirName(absl::string_view path);
std::string BaseName(absl::string_view path);

// A new directory under $TMPDIR (or /tmp), mode 0700, removed with its content by the destructor.
class TempDir {
 public:
  static absl::StatusOr<TempDir> Make(absl::string_view prefix);
  ~TempDir();
  TempDir(TempDir&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  TempDir& operator=(TempDir&&) = delete;
  const std::string& path() const { return path_; }

 private:
  explicit TempDir(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace quern

#endif  // QUERN_BASE_FILE_H_
