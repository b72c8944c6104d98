#include "worker/io/buffer_pool.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/byte_size.h"
#include "base/file.h"
#include "base/task_memory.h"

namespace quern::worker {

PoolBuffer& PoolBuffer::operator=(PoolBuffer&& other) noexcept {
  if (this != &other) {
    Release();
    ring_ = std::exchange(other.ring_, nullptr);
    ticket_ = other.ticket_;
    data_ = other.data_;
    size_ = other.size_;
  }
  return *this;
}

void PoolBuffer::Release() {
  if (ring_ != nullptr) std::exchange(ring_, nullptr)->Return(ticket_);
}

std::optional<uint64_t> BufferRing::Place(uint64_t size) const {
  if (parts_.empty()) return size <= size_ ? std::optional<uint64_t>(0) : std::nullopt;
  const uint64_t oldest = parts_.front().offset;
  const uint64_t end = parts_.back().offset + parts_.back().size;
  if (parts_.back().offset >= oldest) {
    // Used is [oldest, end): free is behind it, then before it. A part is never split.
    if (size_ - end >= size) return end;
    if (oldest >= size) return 0;
    return std::nullopt;
  }
  if (oldest - end >= size) return end;
  return std::nullopt;
}

std::optional<PoolBuffer> BufferRing::Acquire(uint64_t size, absl::Duration timeout) {
  const uint64_t rounded = RoundUp(std::max<uint64_t>(size, 1), kIoBlock);
  MutexLock lock(&mutex_);
  std::optional<uint64_t> offset = Place(rounded);
  while (!offset.has_value()) {
    if (!returned_.WaitFor(&mutex_, timeout)) return std::nullopt;
    offset = Place(rounded);
  }
  parts_.push_back({*offset, rounded, false});
  return PoolBuffer(this, first_ticket_ + parts_.size() - 1, base_ + *offset, rounded);
}

void BufferRing::Return(uint64_t ticket) {
  MutexLock lock(&mutex_);
  parts_[ticket - first_ticket_].returned = true;
  while (!parts_.empty() && parts_.front().returned) {
    parts_.pop_front();
    ++first_ticket_;
  }
  returned_.SignalAll();
}

PoolLayout PoolLayout::For(uint64_t memory, const Needs& needs) {
  // What a fast disk has in flight is far below this; more would only be touched, not used, but for tiles that cannot be cut.
  const uint64_t most_useful = std::max(64 * kMiB, needs.minimum / 4);
  PoolLayout layout;
  const bool more = needs.slabs || needs.sets;
  if (!needs.output && !more) {
    layout.input = RoundDown(std::min(memory, most_useful), kIoBlock);
    return layout;
  }
  layout.held = RoundDown(memory / kSideTensorShare, kIoBlock);
  layout.input = RoundDown(std::min(memory / (more ? 4 : 2), most_useful), kIoBlock);
  uint64_t rest = memory - layout.held - layout.input;
  if (needs.output) {
    // A chunk is a power of two of 256 KiB to 4 MiB, and there are at least 16 of them.
    const uint64_t output = std::min(more ? memory / 4 : rest, most_useful);
    layout.chunk = 4 * kMiB;
    while (layout.chunk > 256 * kKiB && layout.chunk * 16 > output) layout.chunk /= 2;
    layout.output = RoundDown(output, layout.chunk);
    layout.window = RoundDown(std::min(layout.output / 4, std::max(8 * kMiB, needs.minimum / 16)), layout.chunk);
    rest -= layout.output;
  }
  if (needs.slabs) layout.slabs = RoundDown(needs.sets ? rest / 2 : rest, kIoBlock);
  if (needs.sets) layout.sets = RoundDown(rest - layout.slabs, kIoBlock);
  return layout;
}

absl::StatusOr<std::unique_ptr<BufferPool>> BufferPool::Create(const PoolLayout& layout) {
  const uint64_t private_size = layout.total() - layout.output;
  // The whole range first, without memory behind it; then each part over its place.
  void* range = mmap(nullptr, layout.total() + layout.window, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return ErrnoToStatus(errno, "mmap", "the buffer pool");
  std::unique_ptr<BufferPool> pool(new BufferPool(layout, static_cast<std::byte*>(range)));
  if (private_size > 0) {
    void* made = mmap(pool->base_, private_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (made == MAP_FAILED) return ErrnoToStatus(errno, "mmap", "the buffer pool");
    // A hint: large pages make direct I/O cheaper, and kernels without them say EINVAL.
    madvise(pool->base_, private_size, MADV_HUGEPAGE);
  }
  if (layout.output > 0) {
    // Memory that can be mapped twice.
    UniqueFd memory(memfd_create("quern-output", MFD_CLOEXEC));
    if (!memory) return ErrnoToStatus(errno, "memfd_create", "the output window");
    if (ftruncate(memory.get(), static_cast<off_t>(layout.output)) != 0) return ErrnoToStatus(errno, "ftruncate", "the output window");
    std::byte* const output = pool->output();
    for (const auto& [address, size] : {std::pair(output, layout.output), std::pair(output + layout.output, layout.window)}) {
      if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, memory.get(), 0) == MAP_FAILED) {
        return ErrnoToStatus(errno, "mmap", "the output window");
      }
    }
  }
  return pool;
}

BufferPool::~BufferPool() { munmap(base_, layout_.total() + layout_.window); }

}  // namespace quern::worker
