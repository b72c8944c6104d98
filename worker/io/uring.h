// io_uring: the only file pair that includes liburing. Reads and writes at offsets, completed on the ring's own thread.
#ifndef QUERN_WORKER_IO_URING_H_
#define QUERN_WORKER_IO_URING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"

namespace quern::worker {

// Thread-safe. Buffers and files of an operation must live until its callback has been called; the destructor waits for all of them.
class Uring {
 public:
  // Bytes moved, or a negative errno.
  using Done = std::function<void(int result)>;

  // At most `depth` operations are in flight. An error where the kernel or a sandbox refuses io_uring (ENOSYS, EPERM, ENOMEM).
  static absl::StatusOr<std::unique_ptr<Uring>> Create(unsigned depth);
  virtual ~Uring() = default;

  // Pins a part of memory once, so that operations inside it need not. False, with no harm done, where the limit on locked memory
  // (RLIMIT_MEMLOCK) forbids it. At most twice, before the first operation.
  virtual bool Register(std::byte* data, uint64_t size) = 0;

  // Starts an operation. Blocks while `depth` are in flight, except on the ring's own thread (from a callback).
  virtual void Read(int fd, uint64_t offset, std::byte* data, uint32_t size, Done done) = 0;
  virtual void Write(int fd, uint64_t offset, const std::byte* data, uint32_t size, Done done) = 0;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_URING_H_
