#include "worker/io/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

// Chunks under way. Four of 4 MiB keep an NVMe drive busy.
constexpr int kDepth = 8;
// Small enough to stay in the cache between the thread that filled it and the one that hashes.
constexpr uint64_t kHashStep = 256 * 1024;

// Adds [begin, end) to what is known ahead and moves `front` over all that now joins it.
void Join(uint64_t begin, uint64_t end, uint64_t* front, std::map<uint64_t, uint64_t>* ahead) {
  if (begin != *front) {
    ahead->emplace(begin, end);
    return;
  }
  *front = end;
  for (auto it = ahead->begin(); it != ahead->end() && it->first == *front; it = ahead->erase(it)) *front = it->second;
}

}  // namespace

OutputFile::OutputFile(Options options) : options_(std::move(options)), layout_(options_.pool->layout()), ring_(options_.pool->output()) {}

absl::StatusOr<std::unique_ptr<OutputFile>> OutputFile::Create(Options options) {
  std::unique_ptr<OutputFile> file(new OutputFile(std::move(options)));
  QUERN_RETURN_IF_ERROR(file->Open());
  file->writer_ = std::thread([self = file.get()] { self->WriteLoop(); });
  file->hasher_ = std::thread([self = file.get()] { self->HashLoop(); });
  return file;
}

absl::Status OutputFile::Open() {
  // A sink may keep all of the window until it is durable, while the next bytes come in.
  if (options_.sink != nullptr) return options_.sink->Begin(options_.size, layout_.output / 2);
  QUERN_ASSIGN_OR_RETURN(directory_, HeldDirectory::Open(DirName(options_.path)));
  const std::string name = BaseName(options_.path);
  QUERN_ASSIGN_OR_RETURN(fd_, directory_->OpenFile(name, O_WRONLY | O_CREAT | O_EXCL));
  created_ = true;
  if (options_.size > 0) {
    int result;
    do {
      result = fallocate(fd_.get(), 0, 0, static_cast<off_t>(options_.size));
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) return ErrnoToStatus(errno, "allocate", options_.path);
  }
  if (options_.uring != nullptr) {
    absl::StatusOr<UniqueFd> direct = directory_->OpenFile(name, O_WRONLY | O_DIRECT);
    if (direct.ok()) {
      direct_fd_ = *std::move(direct);
      direct_ = true;
    }
  }
  return absl::OkStatus();
}

OutputFile::~OutputFile() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.SignalAll();
  }
  if (options_.sink != nullptr && !finished_) options_.sink->Cancel();
  if (writer_.joinable()) writer_.join();
  if (hasher_.joinable()) hasher_.join();
  {
    MutexLock lock(&mutex_);
    while (in_flight_ > 0) changed_.Wait(&mutex_);
  }
  // The task has failed already; a file that cannot be removed is left to the coordinator's cleanup.
  if (created_ && !finished_) directory_->RemoveFile(BaseName(options_.path)).IgnoreError();
}

bool OutputFile::Reserve(uint64_t size, absl::Duration timeout) {
  MutexLock lock(&mutex_);
  // Whole blocks: the padding behind the file's last byte needs its place, too.
  while (RoundUp(reserved_ + size, kIoBlock) - std::min(hashed_, written_) > layout_.output) {
    if (!changed_.WaitFor(&mutex_, timeout)) return false;
  }
  reserved_ += size;
  return true;
}

void OutputFile::Complete(uint64_t offset, uint64_t size) {
  if (size == 0) return;
  MutexLock lock(&mutex_);
  const uint64_t before = complete_;
  Join(offset, offset + size, &complete_, &complete_ahead_);
  if (complete_ != before) changed_.SignalAll();
}

uint64_t OutputFile::Writable() const { return complete_ == options_.size ? complete_ : RoundDown(complete_, layout_.chunk); }

void OutputFile::WriteLoop() {
  // What a sink has under way is bounded by the window alone.
  const int depth = options_.sink == nullptr ? kDepth : std::numeric_limits<int>::max();
  while (true) {
    uint64_t offset, size;
    {
      MutexLock lock(&mutex_);
      const absl::Duration began = Clock::Real()->Monotonic();
      bool starved = false;
      while (!stop_ && !failed_ && submitted_ < options_.size && (Writable() == submitted_ || in_flight_ >= depth)) {
        starved = Writable() == submitted_;
        changed_.Wait(&mutex_);
      }
      if (starved) times_.stall_seconds += absl::ToDoubleSeconds(Clock::Real()->Monotonic() - began);
      if (stop_ || failed_ || submitted_ == options_.size) return;
      offset = submitted_;
      size = std::min(layout_.chunk, Writable() - offset);
      submitted_ += size;
      if (in_flight_++ == 0) write_began_ = Clock::Real()->Monotonic();
    }
    StartWrite(offset, size);
  }
}

void OutputFile::StartWrite(uint64_t offset, uint64_t size) {
  if (options_.sink != nullptr) {
    options_.sink->Write(At(offset), size, [this, offset, size](absl::Status status) {
      if (status.ok()) {
        Written(offset, size);
      } else {
        Failed(status);
      }
    });
    return;
  }
  if (!direct_) {
    WriteBuffered(offset, size);
    return;
  }
  // The last chunk is padded to a block; Finish cuts the padding off.
  const uint64_t padded = RoundUp(size, kIoBlock);
  if (padded != size) memset(At(offset) + size, 0, padded - size);
  ContinueDirect(offset, size, 0);
}

void OutputFile::ContinueDirect(uint64_t offset, uint64_t size, uint64_t done) {
  const uint64_t padded = RoundUp(size, kIoBlock);
  options_.uring->Write(direct_fd_.get(), offset + done, At(offset) + done, static_cast<uint32_t>(padded - done), [=, this](int result) {
    if (result == -EINTR || result == -EAGAIN) {
      ContinueDirect(offset, size, done);
    } else if (result == -EINVAL || result == -EOPNOTSUPP || result == -ENOSYS || result == -EPERM) {
      // The filesystem took O_DIRECT at open but not here.
      direct_ = false;
      WriteBuffered(offset, size);
    } else if (result < 0) {
      Failed(ErrnoToStatus(-result, absl::StrCat("write at ", offset, " of"), options_.path));
    } else if (result == 0) {
      Failed(absl::DataLossError(absl::StrCat("write ", options_.path, ": nothing was written at ", offset + done)));
    } else if (done + result < padded && (done + result) % kIoBlock == 0) {
      ContinueDirect(offset, size, done + result);
    } else if (done + result < padded) {
      // A short write that ends within a block: the rest goes through the page cache.
      WriteBuffered(offset, size);
    } else {
      Written(offset, size);
    }
  });
}

void OutputFile::WriteBuffered(uint64_t offset, uint64_t size) {
  if (absl::Status status = WriteExactly(fd_.get(), offset, At(offset), size, options_.path); !status.ok()) {
    Failed(status);
    return;
  }
  // A hint: writing back starts now and not all at once with fsync, which reports what failed.
  sync_file_range(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(size), SYNC_FILE_RANGE_WRITE);
  Written(offset, size);
}

void OutputFile::Written(uint64_t offset, uint64_t size) {
  if (options_.bytes_written != nullptr) *options_.bytes_written += size;
  MutexLock lock(&mutex_);
  Join(offset, offset + size, &written_, &written_ahead_);
  if (--in_flight_ == 0) times_.write_seconds += absl::ToDoubleSeconds(Clock::Real()->Monotonic() - write_began_);
  changed_.SignalAll();
}

void OutputFile::Failed(const absl::Status& status) {
  options_.on_error(status);
  MutexLock lock(&mutex_);
  failed_ = true;
  --in_flight_;
  changed_.SignalAll();
}

void OutputFile::HashLoop() {
  while (true) {
    uint64_t begin, end;
    {
      MutexLock lock(&mutex_);
      while (!stop_ && !failed_ && complete_ == hashed_ && hashed_ < options_.size) changed_.Wait(&mutex_);
      if (stop_ || failed_ || hashed_ == options_.size) return;
      begin = hashed_;
      end = std::min(complete_, begin + kHashStep);
      // The window's end is contiguous only for PoolLayout::window bytes: hash up to where it closes.
      end = std::min(end, RoundDown(begin, layout_.output) + layout_.output);
    }
    const absl::Duration began = Clock::Real()->Monotonic();
    sha_.Update(At(begin), end - begin);
    MutexLock lock(&mutex_);
    times_.hash_seconds += absl::ToDoubleSeconds(Clock::Real()->Monotonic() - began);
    hashed_ = end;
    changed_.SignalAll();
  }
}

bool OutputFile::Drained(absl::Duration timeout) {
  MutexLock lock(&mutex_);
  while (hashed_ != options_.size || written_ != options_.size) {
    if (!changed_.WaitFor(&mutex_, timeout)) return false;
  }
  return true;
}

absl::StatusOr<std::string> OutputFile::Finish() {
  writer_.join();
  hasher_.join();
  if (options_.sink != nullptr) {
    QUERN_RETURN_IF_ERROR(options_.sink->Finish());
    finished_ = true;
    return sha_.Finish();
  }
  if (ftruncate(fd_.get(), static_cast<off_t>(options_.size)) != 0) return ErrnoToStatus(errno, "truncate", options_.path);
  if (fsync(fd_.get()) != 0) return ErrnoToStatus(errno, "fsync", options_.path);
  QUERN_RETURN_IF_ERROR(direct_fd_.Close(options_.path));
  QUERN_RETURN_IF_ERROR(fd_.Close(options_.path));
  QUERN_RETURN_IF_ERROR(directory_->Sync());
  finished_ = true;
  return sha_.Finish();
}

OutputFile::Times OutputFile::times() const {
  MutexLock lock(&mutex_);
  return times_;
}

}  // namespace quern::worker
