#include "worker/io/source_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/mutex.h"
#include "worker/io/guarded_copy.h"

namespace quern::worker {
namespace {

absl::Status Ended(const SourceHandle& file, uint64_t offset) {
  return absl::DataLossError(
      absl::StrCat("read ", file.path, ": the file ended at ", offset, " or before; it had ", file.size, " bytes when it was opened"));
}

// Refusals of direct I/O or of io_uring, as opposed to failures of the file.
bool IsRefusal(int error) { return error == EINVAL || error == EOPNOTSUPP || error == ENOSYS || error == EPERM; }

absl::Status ReadBuffered(const ReadRequest& request) {
  return ReadExactly(request.file->fd.get(), request.offset, request.buffer + request.offset % kIoBlock, request.size, request.file->path);
}

// Blocking reads on threads of their own.
class ThreadReader : public SourceReader {
 public:
  explicit ThreadReader(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~ThreadReader() override { Stop(); }

  void Read(ReadRequest request) override {
    MutexLock lock(&mutex_);
    queue_.push_back(std::move(request));
    changed_.Signal();
  }

 protected:
  virtual absl::Status ReadNow(const ReadRequest& request) = 0;
  // Ends the threads after the queue is empty. Derived destructors call it while ReadNow can still run.
  void Stop() {
    {
      MutexLock lock(&mutex_);
      stop_ = true;
      changed_.SignalAll();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void Run() {
    while (true) {
      ReadRequest request;
      {
        MutexLock lock(&mutex_);
        while (queue_.empty() && !stop_) changed_.Wait(&mutex_);
        if (queue_.empty()) return;
        request = std::move(queue_.front());
        queue_.pop_front();
      }
      request.done(ReadNow(request));
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::deque<ReadRequest> queue_ QUERN_GUARDED_BY(mutex_);
  bool stop_ QUERN_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

class BufferedReader : public ThreadReader {
 public:
  // Two, so that one copies while the other waits for the disk.
  BufferedReader() : ThreadReader(2) {}
  ~BufferedReader() override { Stop(); }
  absl::string_view name() const override { return "buffered"; }

 protected:
  absl::Status ReadNow(const ReadRequest& request) override {
    absl::Status status = ReadBuffered(request);
    // A hint. The pages were read once and are of no more use; a cgroup's limit counts them.
    posix_fadvise(request.file->fd.get(), static_cast<off_t>(request.offset), static_cast<off_t>(request.size), POSIX_FADV_DONTNEED);
    return status;
  }
};

class MmapReader : public ThreadReader {
 public:
  MmapReader() : ThreadReader(1) {}
  ~MmapReader() override {
    Stop();
    Drop();
  }
  absl::string_view name() const override { return "mmap"; }

 protected:
  absl::Status ReadNow(const ReadRequest& request) override {
    uint64_t offset = request.offset;
    uint64_t left = request.size;
    std::byte* to = request.buffer + request.offset % kIoBlock;
    while (left > 0) {
      if (request.file != file_ || offset < begin_ || offset >= end_) {
        if (absl::Status status = Map(*request.file, offset); !status.ok()) return status;
      }
      const uint64_t size = std::min(left, end_ - offset);
      const absl::Status copied = GuardedCopy(to, window_ + (offset - begin_), size);
      if (absl::IsDataLoss(copied)) return Ended(*request.file, request.offset + request.size);
      if (!copied.ok()) {
        return absl::FailedPreconditionError(
            absl::StrCat("read ", request.file->path, ": ", std::string(copied.message()), " (try --reader buffered)"));
      }
      to += size;
      offset += size;
      left -= size;
    }
    return absl::OkStatus();
  }

 private:
  static constexpr uint64_t kWindow = 64 * kMiB;

  absl::Status Map(const SourceHandle& file, uint64_t offset) {
    Drop();
    if (offset >= file.size) return Ended(file, offset);
    const uint64_t begin = RoundDown(offset, 64 * kKiB);  // the page size of every kernel divides it
    const uint64_t end = std::min(begin + kWindow, file.size);
    void* window = mmap(nullptr, end - begin, PROT_READ, MAP_SHARED, file.fd.get(), static_cast<off_t>(begin));
    if (window == MAP_FAILED) return ErrnoToStatus(errno, "mmap", file.path);
    madvise(window, end - begin, MADV_SEQUENTIAL);  // a hint
    window_ = static_cast<std::byte*>(window);
    file_ = &file;
    begin_ = begin;
    end_ = end;
    return absl::OkStatus();
  }

  void Drop() {
    if (file_ == nullptr) return;
    munmap(window_, end_ - begin_);
    posix_fadvise(file_->fd.get(), static_cast<off_t>(begin_), static_cast<off_t>(end_ - begin_), POSIX_FADV_DONTNEED);  // a hint
    file_ = nullptr;
  }

  // Of the only thread.
  std::byte* window_ = nullptr;
  const SourceHandle* file_ = nullptr;
  uint64_t begin_ = 0;
  uint64_t end_ = 0;
};

class DirectReader : public SourceReader {
 public:
  // `fallback`: what is refused is read buffered.
  DirectReader(Uring* uring, bool fallback) : uring_(uring), fallback_(fallback) {}
  ~DirectReader() override {
    MutexLock lock(&mutex_);
    while (in_flight_ > 0) changed_.Wait(&mutex_);
  }

  absl::string_view name() const override { return fell_back_ ? "buffered" : "direct"; }

  void Read(ReadRequest request) override {
    if (!request.file->direct_fd) {
      // Opened without: only kAuto lets that happen.
      FallBack()->Read(std::move(request));
      return;
    }
    {
      MutexLock lock(&mutex_);
      ++in_flight_;
    }
    Continue(std::make_shared<ReadRequest>(std::move(request)), 0);
  }

 private:
  // Reads what is missing behind the first `have` bytes of the request's blocks.
  void Continue(std::shared_ptr<ReadRequest> request, uint64_t have) {
    const uint64_t begin = RoundDown(request->offset, kIoBlock);
    const uint64_t size = BufferFor(request->offset, request->size);
    uring_->Read(request->file->direct_fd.get(), begin + have, request->buffer + have, static_cast<uint32_t>(size - have),
                 [this, request, have](int result) { OnRead(request, have, result); });
  }

  void OnRead(const std::shared_ptr<ReadRequest>& request, uint64_t have, int result) {
    const SourceHandle& file = *request->file;
    if (result == -EINTR || result == -EAGAIN) {
      Continue(request, have);
      return;
    }
    if (result < 0) {
      if (IsRefusal(-result) && fallback_) {
        FallBack()->Read(std::move(*request));
      } else {
        absl::Status status = ErrnoToStatus(-result, absl::StrCat("direct read at ", request->offset, " of"), file.path);
        request->done(IsRefusal(-result) ? absl::FailedPreconditionError(absl::StrCat(status.message(), " (try --reader buffered)"))
                                         : status);
      }
      OneLess();
      return;
    }
    have += static_cast<uint64_t>(result);
    const uint64_t needed = request->offset % kIoBlock + request->size;
    if (have >= needed) {
      request->done(absl::OkStatus());
      OneLess();
    } else if (result == 0 || have % kIoBlock != 0) {
      request->done(Ended(file, RoundDown(request->offset, kIoBlock) + have));
      OneLess();
    } else {
      Continue(request, have);
    }
  }

  BufferedReader* FallBack() {
    fell_back_ = true;
    MutexLock lock(&mutex_);
    if (buffered_ == nullptr) buffered_ = std::make_unique<BufferedReader>();
    return buffered_.get();
  }

  void OneLess() {
    MutexLock lock(&mutex_);
    --in_flight_;
    changed_.SignalAll();
  }

  Uring* const uring_;
  const bool fallback_;
  std::atomic<bool> fell_back_{false};
  Mutex mutex_;
  CondVar changed_;
  uint64_t in_flight_ QUERN_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<BufferedReader> buffered_ QUERN_GUARDED_BY(mutex_);
};

class FetchingReader : public SourceReader {
 public:
  FetchingReader(std::unique_ptr<SourceReader> local, RangeFetcher* fetcher) : local_(std::move(local)), fetcher_(fetcher) {}
  ~FetchingReader() override {
    MutexLock lock(&mutex_);
    while (in_flight_ > 0) changed_.Wait(&mutex_);
  }

  absl::string_view name() const override { return fetched_ ? "fetched" : local_->name(); }

  void Read(ReadRequest request) override {
    if (!request.file->fetched) {
      local_->Read(std::move(request));
      return;
    }
    fetched_ = true;
    {
      MutexLock lock(&mutex_);
      ++in_flight_;
    }
    fetcher_->Fetch(request.file->path, request.offset, request.buffer + request.offset % kIoBlock, request.size,
                    [this, done = std::move(request.done)](absl::Status status) {
                      done(std::move(status));
                      MutexLock lock(&mutex_);
                      --in_flight_;
                      changed_.SignalAll();
                    });
  }

  void Cancel() override {
    local_->Cancel();
    fetcher_->Cancel();
  }

 private:
  const std::unique_ptr<SourceReader> local_;
  RangeFetcher* const fetcher_;
  std::atomic<bool> fetched_{false};
  Mutex mutex_;
  CondVar changed_;
  uint64_t in_flight_ QUERN_GUARDED_BY(mutex_) = 0;
};

}  // namespace

absl::StatusOr<ReaderMode> ParseReaderMode(absl::string_view name) {
  if (name == "auto") return ReaderMode::kAuto;
  if (name == "direct") return ReaderMode::kDirect;
  if (name == "buffered") return ReaderMode::kBuffered;
  if (name == "mmap") return ReaderMode::kMmap;
  return absl::InvalidArgumentError(absl::StrCat("unknown reader \"", name, "\": one of auto, direct, buffered, mmap"));
}

absl::StatusOr<SourceHandle> OpenSource(const std::string& path, bool direct, bool require_direct) {
  SourceHandle handle;
  handle.path = path;
  absl::StatusOr<UniqueFd> fd = OpenFile(path, O_RDONLY);
  if (!fd.ok()) return fd.status();
  handle.fd = *std::move(fd);
  struct stat info;
  if (fstat(handle.fd.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  handle.size = static_cast<uint64_t>(info.st_size);
  // A hint: more is read ahead.
  posix_fadvise(handle.fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  if (direct) {
    absl::StatusOr<UniqueFd> direct_fd = OpenFile(path, O_RDONLY | O_DIRECT);
    if (direct_fd.ok()) {
      handle.direct_fd = *std::move(direct_fd);
    } else if (require_direct) {
      return absl::FailedPreconditionError(
          absl::StrCat("direct I/O is refused (try --reader auto): ", std::string(direct_fd.status().message())));
    }
  }
  return handle;
}

absl::StatusOr<std::unique_ptr<SourceReader>> NewSourceReader(ReaderMode mode, Uring* uring) {
  switch (mode) {
    case ReaderMode::kBuffered:
      return std::make_unique<BufferedReader>();
    case ReaderMode::kMmap:
      return std::make_unique<MmapReader>();
    case ReaderMode::kDirect:
      if (uring == nullptr) return absl::FailedPreconditionError("io_uring is refused here: use --reader auto or buffered");
      return std::make_unique<DirectReader>(uring, /*fallback=*/false);
    case ReaderMode::kAuto:
      break;
  }
  if (uring == nullptr) return std::make_unique<BufferedReader>();
  return std::make_unique<DirectReader>(uring, /*fallback=*/true);
}

std::unique_ptr<SourceReader> NewFetchingReader(std::unique_ptr<SourceReader> local, RangeFetcher* fetcher) {
  return std::make_unique<FetchingReader>(std::move(local), fetcher);
}

}  // namespace quern::worker
