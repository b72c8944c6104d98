// Where the bytes of an output go that is not a file of this machine.
#ifndef QUERN_WORKER_IO_OUTPUT_SINK_H_
#define QUERN_WORKER_IO_OUTPUT_SINK_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace quern::worker {

// Thread-safe but where it says otherwise. The destructor cancels.
class OutputSink {
 public:
  virtual ~OutputSink() = default;

  // The output begins; it will have `size` bytes, and about `window` of them may wait for durability at a time. Once, before all others.
  virtual absl::Status Begin(uint64_t size, uint64_t window) = 0;

  // The next bytes. They must stay where they are until `done` has been called, from any thread: they are durable then. By one thread.
  virtual void Write(const std::byte* data, uint64_t size, std::function<void(absl::Status)> done) = 0;

  // After all bytes are done: the output is complete. Blocks until its end is durable, too.
  virtual absl::Status Finish() = 0;

  // Ends all that is under way and all that comes later with CANCELLED, soon.
  virtual void Cancel() = 0;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_OUTPUT_SINK_H_
