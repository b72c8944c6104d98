#include "base/held_directory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern {
namespace {

absl::Status NoRegularFile(const std::string& path) { return absl::InvalidArgumentError(absl::StrCat(path, " is no regular file")); }

}  // namespace

absl::StatusOr<HeldDirectory> HeldDirectory::Open(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, quern::OpenFile(path, O_PATH | O_DIRECTORY));
  return HeldDirectory(path, std::move(fd));
}

absl::StatusOr<UniqueFd> HeldDirectory::OpenFile(const std::string& name, int flags, mode_t mode) const {
  int fd;
  do {
    fd = openat(fd_.get(), name.c_str(), flags | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return TakeRegular(UniqueFd(fd), flags, JoinPath(path_, name));
}

absl::Status HeldDirectory::RemoveFile(const std::string& name) const {
  if (unlinkat(fd_.get(), name.c_str(), 0) != 0 && errno != ENOENT) return ErrnoToStatus(errno, "unlink", JoinPath(path_, name));
  return absl::OkStatus();
}

absl::Status HeldDirectory::Sync() const {
  const UniqueFd readable(openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!readable) return ErrnoToStatus(errno, "open", path_);
  return SyncOpenDirectory(readable.get(), path_);
}

absl::StatusOr<UniqueFd> TakeRegular(UniqueFd file, int flags, const std::string& path) {
  // ENXIO: a socket, or a FIFO that nobody reads.
  if (!file && errno == ENXIO) return NoRegularFile(path);
  if (!file) return ErrnoToStatus(errno, "open", path);
  struct stat info;
  if (fstat(file.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  if (!S_ISREG(info.st_mode)) return NoRegularFile(path);
  // io_uring would take O_NONBLOCK as a wish for EAGAIN where a disk has to be waited for.
  if ((flags & O_NONBLOCK) == 0) {
    const int status = fcntl(file.get(), F_GETFL);
    if (status < 0 || fcntl(file.get(), F_SETFL, status & ~O_NONBLOCK) != 0) return ErrnoToStatus(errno, "fcntl", path);
  }
  return file;
}

absl::Status SyncOpenDirectory(int fd, const std::string& path) {
  // Some filesystems (9p, FUSE) cannot sync a directory and say EINVAL; their renames are as durable as they get.
  if (fsync(fd) != 0 && errno != EINVAL) return ErrnoToStatus(errno, "fsync", path);
  return absl::OkStatus();
}

}  // namespace quern
