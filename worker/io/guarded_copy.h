// memcpy from a mapped file that another process may truncate meanwhile.
#ifndef QUERN_WORKER_IO_GUARDED_COPY_H_
#define QUERN_WORKER_IO_GUARDED_COPY_H_

#include <cstddef>

#include "absl/status/status.h"

namespace quern::worker {

// Copies `size` bytes of this process's memory through the kernel, which answers with an error where a load would raise SIGBUS: no signal
// handler is needed. DATA_LOSS when a page of `from` is behind the end of its file, or the disk failed; `to` then holds any bytes.
// Thread-safe.
absl::Status GuardedCopy(void* to, const void* from, size_t size);

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_GUARDED_COPY_H_
