#include "worker/io/uring.h"

#include <errno.h>
#include <liburing.h>

#include <array>
#include <thread>
#include <utility>

#include "base/file.h"
#include "base/mutex.h"

namespace quern::worker {
namespace {

struct Operation {
  bool is_read;
  int fd;
  uint64_t offset;
  std::byte* data;
  uint32_t size;
  Uring::Done done;
};

class UringImpl : public Uring {
 public:
  explicit UringImpl(unsigned depth) : depth_(depth) {}

  absl::Status Start() {
    // Operations started from callbacks come on top of `depth`: there is room for each.
    const int error = io_uring_queue_init(2 * depth_ + 2, &ring_, 0);
    if (error < 0) return ErrnoToStatus(-error, "io_uring_setup", "a ring");
    if (const int result = io_uring_register_buffers_sparse(&ring_, kMaxParts); result == 0) can_register_ = true;
    reaper_ = std::thread([this] { Reap(); });
    return absl::OkStatus();
  }

  ~UringImpl() override {
    if (!reaper_.joinable()) return;
    {
      MutexLock lock(&mutex_);
      while (in_flight_ > 0) changed_.Wait(&mutex_);
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      io_uring_prep_nop(sqe);
      io_uring_sqe_set_data(sqe, nullptr);
      SubmitLocked();
    }
    reaper_.join();
    io_uring_queue_exit(&ring_);
  }

  bool Register(std::byte* data, uint64_t size) override {
    MutexLock lock(&mutex_);
    if (!can_register_ || registered_ == kMaxParts || size > kLargestRegistered) return false;
    iovec part = {data, size};
    __u64 tag = 0;
    if (io_uring_register_buffers_update_tag(&ring_, registered_, &part, &tag, 1) != 1) return false;
    parts_[registered_++] = {data, size};
    return true;
  }

  void Read(int fd, uint64_t offset, std::byte* data, uint32_t size, Done done) override {
    Submit(new Operation{true, fd, offset, data, size, std::move(done)});
  }

  void Write(int fd, uint64_t offset, const std::byte* data, uint32_t size, Done done) override {
    Submit(new Operation{false, fd, offset, const_cast<std::byte*>(data), size, std::move(done)});
  }

 private:
  struct Part {
    std::byte* data = nullptr;
    uint64_t size = 0;
  };
  static constexpr unsigned kMaxParts = 2;
  static constexpr uint64_t kLargestRegistered = uint64_t{1} << 30;  // the kernel's limit

  void Submit(Operation* operation) {
    MutexLock lock(&mutex_);
    if (std::this_thread::get_id() != reaper_id_) {
      while (in_flight_ >= depth_) changed_.Wait(&mutex_);
    }
    ++in_flight_;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    const int part = PartOf(operation->data, operation->size);
    if (operation->is_read) {
      if (part >= 0) {
        io_uring_prep_read_fixed(sqe, operation->fd, operation->data, operation->size, operation->offset, part);
      } else {
        io_uring_prep_read(sqe, operation->fd, operation->data, operation->size, operation->offset);
      }
    } else if (part >= 0) {
      io_uring_prep_write_fixed(sqe, operation->fd, operation->data, operation->size, operation->offset, part);
    } else {
      io_uring_prep_write(sqe, operation->fd, operation->data, operation->size, operation->offset);
    }
    io_uring_sqe_set_data(sqe, operation);
    SubmitLocked();
  }

  // An entry stays in the queue until the kernel took it; EAGAIN and EBUSY ask to wait for completions, which the reaper takes away.
  void SubmitLocked() QUERN_REQUIRES(mutex_) {
    while (io_uring_sq_ready(&ring_) > 0) {
      const int result = io_uring_submit(&ring_);
      if (result < 0 && result != -EINTR) std::this_thread::yield();
    }
  }

  int PartOf(const std::byte* data, uint32_t size) const QUERN_REQUIRES(mutex_) {
    for (unsigned i = 0; i < registered_; ++i) {
      if (data >= parts_[i].data && data + size <= parts_[i].data + parts_[i].size) return static_cast<int>(i);
    }
    return -1;
  }

  void Reap() {
    {
      MutexLock lock(&mutex_);
      reaper_id_ = std::this_thread::get_id();
    }
    while (true) {
      io_uring_cqe* cqe = nullptr;
      if (io_uring_wait_cqe(&ring_, &cqe) < 0) continue;  // EINTR
      std::unique_ptr<Operation> operation(static_cast<Operation*>(io_uring_cqe_get_data(cqe)));
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (operation == nullptr) return;
      // Also orders us after the thread that made the operation, in a way that ThreadSanitizer sees.
      Done done;
      {
        MutexLock lock(&mutex_);
        done = std::move(operation->done);
      }
      done(result);
      MutexLock lock(&mutex_);
      --in_flight_;
      changed_.SignalAll();
    }
  }

  const unsigned depth_;
  io_uring ring_;  // submission side under mutex_, completion side by the reaper alone
  std::thread reaper_;
  Mutex mutex_;
  CondVar changed_;
  std::thread::id reaper_id_ QUERN_GUARDED_BY(mutex_);
  unsigned in_flight_ QUERN_GUARDED_BY(mutex_) = 0;
  bool can_register_ = false;
  std::array<Part, kMaxParts> parts_ QUERN_GUARDED_BY(mutex_);
  unsigned registered_ QUERN_GUARDED_BY(mutex_) = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Uring>> Uring::Create(unsigned depth) {
  auto ring = std::make_unique<UringImpl>(depth);
  if (absl::Status status = ring->Start(); !status.ok()) return status;
  return ring;
}

}  // namespace quern::worker
