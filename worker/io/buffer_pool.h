// All memory of a task that grows with its data: one mapping of at most the budget, divided once into parts.
//
//   input   tiles as they are read; a ring (BufferRing)
//   held    side tensors of one module until their turn in the file, inputs of modules; a ring
//   slabs   rows of weights that must be gathered (transposed ones); a ring; only for tasks that have such
//   sets    weights that are looked at twice and read once; a ring; only for tasks that have such
//   output  a window on the output file: byte `offset` of the file stands at offset % output size. The part's first `window` bytes are
//   mapped
//           a second time behind its end, so that any `window` bytes are contiguous (no copies where the ring closes).
//
// Pages are touched as they are used (no MAP_POPULATE): a small task does not pay for a large budget.
#ifndef QUERN_WORKER_IO_BUFFER_POOL_H_
#define QUERN_WORKER_IO_BUFFER_POOL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"

namespace quern::worker {

// Direct I/O moves whole blocks of this size, to and from addresses that are multiples of it. Also what allocations are rounded to.
inline constexpr uint64_t kIoBlock = 4096;
inline constexpr uint64_t RoundDown(uint64_t value, uint64_t multiple) { return value - value % multiple; }
inline constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) { return RoundDown(value + multiple - 1, multiple); }

class BufferRing;

// A part of a BufferRing, given back by the destructor. Moves only.
class PoolBuffer {
 public:
  PoolBuffer() = default;
  ~PoolBuffer() { Release(); }
  PoolBuffer(PoolBuffer&& other) noexcept
      : ring_(std::exchange(other.ring_, nullptr)), ticket_(other.ticket_), data_(other.data_), size_(other.size_) {}
  PoolBuffer& operator=(PoolBuffer&& other) noexcept;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  explicit operator bool() const { return ring_ != nullptr; }
  void Release();

 private:
  friend class BufferRing;
  PoolBuffer(BufferRing* ring, uint64_t ticket, std::byte* data, uint64_t size) : ring_(ring), ticket_(ticket), data_(data), size_(size) {}
  BufferRing* ring_ = nullptr;
  uint64_t ticket_ = 0;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// Gives out contiguous parts of a region in ascending order, around and around; they come back in any order and are reused once all older
// ones are back. There is no fragmentation, and a request waits only for older ones. Thread-safe; must outlive its buffers.
class BufferRing {
 public:
  // `base` is aligned to kIoBlock, `size` a multiple of it. Does not own the memory.
  BufferRing(std::byte* base, uint64_t size) : base_(base), size_(size) {}
  BufferRing(const BufferRing&) = delete;
  BufferRing& operator=(const BufferRing&) = delete;

  uint64_t size() const { return size_; }
  // The largest request that is sure to be met once all older buffers are back.
  uint64_t largest() const { return size_; }

  // `size` bytes (0 counts as 1) at a multiple of kIoBlock. Blocks; nothing when `timeout` passed first. `size` is at most largest().
  std::optional<PoolBuffer> Acquire(uint64_t size, absl::Duration timeout);

 private:
  friend class PoolBuffer;
  struct Part {
    uint64_t offset;
    uint64_t size;
    bool returned;
  };
  void Return(uint64_t ticket);
  // Where a part of `size` bytes would begin now.
  std::optional<uint64_t> Place(uint64_t size) const QUERN_REQUIRES(mutex_);

  std::byte* const base_;
  const uint64_t size_;
  Mutex mutex_;
  CondVar returned_;
  std::deque<Part> parts_ QUERN_GUARDED_BY(mutex_);  // given out, oldest first
  uint64_t first_ticket_ QUERN_GUARDED_BY(mutex_) = 0;
};

// How a budget is divided.
struct PoolLayout {
  uint64_t input = 0;
  uint64_t held = 0;
  uint64_t slabs = 0;
  uint64_t sets = 0;
  uint64_t output = 0;  // a multiple of `chunk`; 0 for tasks without output
  uint64_t window = 0;
  uint64_t chunk = 0;  // what one write moves

  uint64_t total() const { return input + held + slabs + sets + output; }
  // `memory` is at least kMinimumTaskMemory. total() is at most `memory`; parts that would not gain from more stay smaller.
  struct Needs {
    bool output = false;
    bool slabs = false;
    bool sets = false;
    uint64_t minimum = 0;  // the least pool that the task was planned for: no part is smaller than in that one
  };
  static PoolLayout For(uint64_t memory, const Needs& needs);
};

class BufferPool {
 public:
  static absl::StatusOr<std::unique_ptr<BufferPool>> Create(const PoolLayout& layout);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  const PoolLayout& layout() const { return layout_; }
  std::byte* input() const { return base_; }
  std::byte* held() const { return base_ + layout_.input; }
  std::byte* slabs() const { return held() + layout_.held; }
  std::byte* sets() const { return slabs() + layout_.slabs; }
  std::byte* output() const { return sets() + layout_.sets; }

 private:
  BufferPool(const PoolLayout& layout, std::byte* base) : layout_(layout), base_(base) {}
  const PoolLayout layout_;
  std::byte* const base_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_BUFFER_POOL_H_
