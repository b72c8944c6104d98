#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/file_roots.h"
#include "base/held_directory.h"
#include "base/status_macros.h"

namespace quern {
namespace {

// Linux moves at most this much in one call.
constexpr size_t kMaxTransfer = 0x7ffff000;

// In no order, without "." and "..".
absl::StatusOr<std::vector<std::string>> NamesIn(UniqueFd directory, const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(fdopendir(directory.get()), closedir);
  if (stream == nullptr) return ErrnoToStatus(errno, "list", path);
  directory.release();  // closedir closes it
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* const entry = readdir(stream.get());
    if (entry == nullptr && errno != 0) return ErrnoToStatus(errno, "list", path);
    if (entry == nullptr) return names;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
}

// Follows no link, and what somebody else removes meanwhile is no error.
absl::Status EmptyDirectory(UniqueFd directory, const std::string& path) {
  const int at = fcntl(directory.get(), F_DUPFD_CLOEXEC, 0);
  if (at < 0) return ErrnoToStatus(errno, "open", path);
  const UniqueFd held(at);
  QUERN_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(std::move(directory), path));
  for (const std::string& name : names) {
    if (unlinkat(at, name.c_str(), 0) == 0 || errno == ENOENT) continue;
    if (errno != EISDIR && errno != EPERM) return ErrnoToStatus(errno, "remove", JoinPath(path, name));
    UniqueFd child(openat(at, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!child) {
      if (errno == ENOENT) continue;
      return ErrnoToStatus(errno, "remove", JoinPath(path, name));
    }
    QUERN_RETURN_IF_ERROR(EmptyDirectory(std::move(child), JoinPath(path, name)));
    if (unlinkat(at, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) return ErrnoToStatus(errno, "remove", JoinPath(path, name));
  }
  return absl::OkStatus();
}

absl::Status LinkInTheWay(absl::string_view call, absl::string_view path) {
  return absl::PermissionDeniedError(absl::StrCat(call, " ", path, ": a symbolic link is in the way, and none is followed to an output"));
}

}  // namespace

absl::Status ErrnoToStatus(int error, absl::string_view call, absl::string_view path) {
  if (error == ELOOP && RefusesLinks(std::string(path))) return LinkInTheWay(call, path);
  const std::string message = absl::StrCat(call, " ", path, ": ", strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(absl::StrCat("disk full: ", message));
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::ResourceExhaustedError(message);
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EEXIST:
    case ENOTEMPTY:
      return absl::AlreadyExistsError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    case EINVAL:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return absl::InvalidArgumentError(message);
    case EIO:
    case ESTALE:
      return absl::DataLossError(message);
    default:
      return absl::UnavailableError(message);
  }
}

void UniqueFd::Reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

absl::Status UniqueFd::Close(absl::string_view path) {
  const int fd = release();
  // After EINTR Linux has closed the descriptor all the same.
  if (fd >= 0 && close(fd) != 0 && errno != EINTR) return ErrnoToStatus(errno, "close", path);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags, mode_t mode) {
  if ((flags & (O_DIRECTORY | O_PATH)) != 0) {
    UniqueFd directory(ConfinedOpen(path, flags, mode));
    if (!directory) return ErrnoToStatus(errno, "open", path);
    return directory;
  }
  return TakeRegular(UniqueFd(ConfinedOpen(path, flags | O_NONBLOCK, mode)), flags, path);
}

absl::Status ReadExactly(int fd, uint64_t offset, void* data, size_t size, absl::string_view path) {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = pread(fd, to, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (n < 0) {
      if (errno == EINTR) continue;
      return ErrnoToStatus(errno, "read", path);
    }
    if (n == 0) return absl::DataLossError(absl::StrCat("read ", path, ": file ended at ", offset, ", ", size, " bytes short"));
    to += n;
    offset += n;
    size -= n;
  }
  return absl::OkStatus();
}

absl::Status WriteExactly(int fd, uint64_t offset, const void* data, size_t size, absl::string_view path) {
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = pwrite(fd, from, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (n < 0) {
      if (errno == EINTR) continue;
      return ErrnoToStatus(errno, "write", path);
    }
    from += n;
    offset += n;
    size -= n;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFileToString(const std::string& path, uint64_t limit) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY));
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  if (static_cast<uint64_t>(info.st_size) > limit) {
    return absl::ResourceExhaustedError(absl::StrCat(path, " has ", info.st_size, " bytes, more than the ", limit, " allowed here"));
  }
  std::string content(info.st_size, '\0');
  QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), 0, content.data(), content.size(), path));
  return content;
}

absl::StatusOr<std::string> ReadKernelFile(const std::string& path, uint64_t limit) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY));
  std::string content;
  char block[4096];
  while (true) {
    const ssize_t n = read(fd.get(), block, sizeof(block));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoToStatus(errno, "read", path);
    if (n == 0) return content;
    content.append(block, n);
    if (content.size() > limit) {
      return absl::ResourceExhaustedError(absl::StrCat(path, " has more than the ", limit, " bytes allowed here"));
    }
  }
}

absl::Status WriteFileDurably(const std::string& path, absl::string_view content) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(temporary, O_WRONLY | O_CREAT | O_TRUNC));
  QUERN_RETURN_IF_ERROR(WriteExactly(fd.get(), 0, content.data(), content.size(), temporary));
  if (fsync(fd.get()) != 0) return ErrnoToStatus(errno, "fsync", temporary);
  QUERN_RETURN_IF_ERROR(fd.Close(temporary));
  QUERN_RETURN_IF_ERROR(RenameFile(temporary, path));
  return SyncDirectory(DirName(path));
}

absl::Status SyncDirectory(const std::string& directory) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(directory, O_RDONLY | O_DIRECTORY));
  return SyncOpenDirectory(fd.get(), directory);
}

absl::Status RenameFile(const std::string& from, const std::string& to) {
  if (ConfinedRename(from, to) == 0) return absl::OkStatus();
  if (errno == ELOOP && RefusesLinks(from)) return LinkInTheWay("rename", from);
  return ErrnoToStatus(errno, absl::StrCat("rename ", from, " to"), to);
}

absl::Status RemoveFile(const std::string& path) {
  if (ConfinedUnlink(path) != 0 && errno != ENOENT) return ErrnoToStatus(errno, "unlink", path);
  return absl::OkStatus();
}

absl::Status MakeDirectories(const std::string& path, mode_t mode) {
  if (ConfinedMkdir(path, mode) == 0) return absl::OkStatus();
  if (errno == EEXIST) {
    struct stat info;
    const bool found = ConfinedStat(path, &info) == 0;
    if (found && S_ISDIR(info.st_mode)) return absl::OkStatus();
    return ErrnoToStatus(!found && errno == ELOOP ? ELOOP : EEXIST, "mkdir", path);
  }
  if (errno != ENOENT || DirName(path) == path) return ErrnoToStatus(errno, "mkdir", path);
  QUERN_RETURN_IF_ERROR(MakeDirectories(DirName(path), mode));
  if (ConfinedMkdir(path, mode) != 0 && errno != EEXIST) return ErrnoToStatus(errno, "mkdir", path);
  return absl::OkStatus();
}

absl::Status RemoveTree(const std::string& path) {
  struct stat info;
  if (ConfinedLstat(path, &info) != 0) {
    return errno == ENOENT || errno == ENOTDIR ? absl::OkStatus() : ErrnoToStatus(errno, "stat", path);
  }
  if (!S_ISDIR(info.st_mode)) return RemoveFile(path);
  // The directory that was looked at, whatever its name stands for by now.
  absl::StatusOr<UniqueFd> directory = OpenFile(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (absl::IsNotFound(directory.status())) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(directory.status());
  QUERN_RETURN_IF_ERROR(EmptyDirectory(*std::move(directory), path));
  if (ConfinedRmdir(path) != 0 && errno != ENOENT) return ErrnoToStatus(errno, "remove", path);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_DIRECTORY));
  QUERN_ASSIGN_OR_RETURN(std::vector<std::string> names, NamesIn(std::move(fd), path));
  std::sort(names.begin(), names.end());
  return names;
}

bool FileExists(const std::string& path) {
  struct stat info;
  return ConfinedStat(path, &info) == 0;
}

absl::StatusOr<uint64_t> FileSize(const std::string& path) {
  struct stat info;
  if (ConfinedStat(path, &info) != 0) return ErrnoToStatus(errno, "stat", path);
  return static_cast<uint64_t>(info.st_size);
}

absl::StatusOr<uint64_t> FreeDiskSpace(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_PATH));
  struct statvfs info;
  if (fstatvfs(fd.get(), &info) != 0) return ErrnoToStatus(errno, "statvfs", path);
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
}

std::string JoinPath(absl::string_view directory, absl::string_view name) {
  if (directory.empty()) return std::string(name);
  return absl::StrCat(directory, directory.back() == '/' ? "" : "/", name);
}

std::string DirName(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  return slash == 0 ? "/" : std::string(path.substr(0, slash));
}

std::string BaseName(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  return std::string(slash == absl::string_view::npos ? path : path.substr(slash + 1));
}

absl::StatusOr<TempDir> TempDir::Make(absl::string_view prefix) {
  const char* root = getenv("TMPDIR");
  std::string path = JoinPath(root != nullptr && *root != '\0' ? root : "/tmp", absl::StrCat(prefix, ".XXXXXX"));
  if (mkdtemp(path.data()) == nullptr) return ErrnoToStatus(errno, "mkdtemp", path);
  return TempDir(std::move(path));
}

TempDir::~TempDir() {
  // A temporary directory that cannot be removed harms nobody; there is no one to tell.
  if (!path_.empty()) RemoveTree(path_).IgnoreError();
}

}  // namespace quern
