#include "worker/io/spill_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "base/status_macros.h"

namespace quern::worker {

absl::StatusOr<std::unique_ptr<SpillFile>> SpillFile::Create(const std::string& path, uint64_t size) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDWR | O_CREAT | O_EXCL, 0600));
  QUERN_RETURN_IF_ERROR(RemoveFile(path));
  int result;
  do {
    result = fallocate(fd.get(), 0, 0, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) return ErrnoToStatus(errno, "allocate", path);
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) return ErrnoToStatus(errno, "truncate", path);
  return std::unique_ptr<SpillFile>(new SpillFile(path, std::move(fd)));
}

}  // namespace quern::worker
