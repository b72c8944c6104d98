#include "worker/io/spill_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "base/held_directory.h"
#include "base/status_macros.h"

namespace quern::worker {

absl::StatusOr<std::unique_ptr<SpillFile>> SpillFile::Create(const std::string& path, uint64_t size, Explain explain) {
  std::unique_ptr<SpillFile> spill(new SpillFile(path, std::move(explain)));
  QUERN_RETURN_IF_ERROR(spill->Explained(spill->Allocate(size)));
  return spill;
}

absl::Status SpillFile::Allocate(uint64_t size) {
  QUERN_ASSIGN_OR_RETURN(const HeldDirectory directory, HeldDirectory::Open(DirName(path_)));
  QUERN_ASSIGN_OR_RETURN(fd_, directory.OpenFile(BaseName(path_), O_RDWR | O_CREAT | O_EXCL, 0600));
  QUERN_RETURN_IF_ERROR(directory.RemoveFile(BaseName(path_)));
  int result;
  do {
    result = fallocate(fd_.get(), 0, 0, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) return ErrnoToStatus(errno, "allocate", path_);
  if (ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) return ErrnoToStatus(errno, "truncate", path_);
  return absl::OkStatus();
}

absl::Status SpillFile::Explained(const absl::Status& status) const {
  return absl::IsResourceExhausted(status) && explain_ ? explain_(status) : status;
}

}  // namespace quern::worker
