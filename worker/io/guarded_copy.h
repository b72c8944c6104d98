// memcpy from a mapped file that another process may truncate meanwhile.
#ifndef QUERN_WORKER_IO_GUARDED_COPY_H_
#define QUERN_WORKER_IO_GUARDED_COPY_H_

#include <cstddef>

namespace quern::worker {

// Copies `size` bytes. False when the source raised SIGBUS (its page is behind the end of the file, or the disk failed); `to` then holds
// any bytes. The first call installs the process's SIGBUS handler, which passes signals that no guarded copy raised on to the one before.
// Thread-safe.
bool GuardedCopy(void* to, const void* from, size_t size);

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_GUARDED_COPY_H_
