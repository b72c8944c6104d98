#include "worker/io/guarded_copy.h"

#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/file.h"

namespace quern::worker {

absl::Status GuardedCopy(void* to, const void* from, size_t size) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  while (size > 0) {
    const iovec local = {target, size};
    const iovec remote = {const_cast<char*>(source), size};
    const ssize_t copied = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (copied < 0 && errno == EFAULT) return absl::DataLossError("a page of a mapped file is gone");
    if (copied < 0) return ErrnoToStatus(errno, "process_vm_readv", "a mapped file");
    // Short where the next page cannot be read: the next round says why.
    target += copied;
    source += copied;
    size -= static_cast<size_t>(copied);
  }
  return absl::OkStatus();
}

}  // namespace quern::worker
