#include "daemon/rpc/source_files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

absl::Status Changed(const std::string& path, absl::string_view what) {
  return WithReason(absl::FailedPreconditionError(
                        absl::StrCat("source file ", path, ": ", what, " since the job was planned; plan it again (--overwrite)")),
                    "SOURCE_CHANGED");
}

}  // namespace

SourceFiles::SourceFiles(const quern::v1::TaskSpec& task, Resolve resolve) : resolve_(std::move(resolve)) {
  for (const quern::v1::SourceFile& planned : task.source_files()) {
    File& file = files_[planned.path()];
    file.planned = planned;
    file.known = true;
  }
  for (const std::string* path : {&task.verify_file().path(), &task.compare_shard().path()}) {
    if (!path->empty()) files_[*path].planned.set_path(*path);
  }
}

absl::StatusOr<SourceFiles::File*> SourceFiles::Find(const std::string& path) {
  const auto it = files_.find(path);
  if (it != files_.end()) return &it->second;
  return WithReason(absl::PermissionDeniedError(absl::StrCat("the plan of the task does not name ", path)), "PATH_NOT_ALLOWED");
}

absl::StatusOr<UniqueFd> SourceFiles::Open(const File& file) const {
  const std::string& path = file.planned.path();
  QUERN_ASSIGN_OR_RETURN(const std::string real, resolve_(path));
  // Not blocking: a FIFO may have taken its place.
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(real, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  QUERN_RETURN_IF_ERROR(CheckIdentity(file, fd.get()).status());
  return fd;
}

absl::StatusOr<uint64_t> SourceFiles::CheckIdentity(const File& file, int fd) {
  const quern::v1::SourceFile& planned = file.planned;
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoToStatus(errno, "stat", planned.path());
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(planned.path(), " is no regular file"));
  const auto size = static_cast<uint64_t>(info.st_size);
  if (!file.known) return size;
  const int64_t mtime_ns = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
  if (size != planned.size()) return Changed(planned.path(), absl::StrCat("its size changed from ", planned.size(), " to ", size));
  if (planned.mtime_ns() != 0 && mtime_ns != planned.mtime_ns()) return Changed(planned.path(), "it was modified");
  if (planned.inode() != 0 && info.st_ino != planned.inode()) return Changed(planned.path(), "it was replaced");
  return size;
}

absl::StatusOr<uint64_t> SourceFiles::Check(const std::string& path, bool header) {
  QUERN_ASSIGN_OR_RETURN(const File* const file, Find(path));
  QUERN_ASSIGN_OR_RETURN(const UniqueFd fd, Open(*file));
  QUERN_ASSIGN_OR_RETURN(const uint64_t size, CheckIdentity(*file, fd.get()));
  const quern::v1::SourceFile& planned = file->planned;
  if (!header || planned.header_sha256().empty()) return size;
  if (planned.header_size() > size) return Changed(path, "it is shorter than its header");
  std::string buffer(std::min<uint64_t>(planned.header_size(), kMiB), '\0');
  Sha256 sha;
  for (uint64_t offset = 0; offset < planned.header_size(); offset += buffer.size()) {
    const uint64_t part = std::min<uint64_t>(buffer.size(), planned.header_size() - offset);
    QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), offset, buffer.data(), part, path));
    sha.Update(buffer.data(), part);
  }
  if (sha.Finish() != planned.header_sha256()) return Changed(path, "its header changed");
  return size;
}

absl::Status SourceFiles::Read(const std::string& path, uint64_t offset, uint64_t size, char* out) {
  QUERN_ASSIGN_OR_RETURN(File* const file, Find(path));
  if (!file->fd) {
    QUERN_ASSIGN_OR_RETURN(file->fd, Open(*file));
    posix_fadvise(file->fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);  // a hint: more is read ahead
  }
  QUERN_ASSIGN_OR_RETURN(const uint64_t end, CheckIdentity(*file, file->fd.get()));
  if (offset > end || size > end - offset) {
    return absl::OutOfRangeError(absl::StrCat(path, " has ", end, " bytes, not ", size, " at ", offset));
  }
  return ReadExactly(file->fd.get(), offset, out, size, path);
}

}  // namespace quern::daemon
