#include "worker/pipeline/engine.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

// How often a waiting task looks at control->stop.
constexpr absl::Duration kPoll = absl::Milliseconds(20);
// Bounds what steps of tiny tensors take outside the pool.
constexpr uint64_t kMaxSteps = 512;

double SecondsSince(absl::Duration began) { return absl::ToDoubleSeconds(Clock::Real()->Monotonic() - began); }

// A file that is not as long as it was changed under us; another failure is the disk's.
absl::Status Classify(absl::Status status, const SourceHandle& file) {
  struct stat info;
  if (fstat(file.fd.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) != file.size) {
    return WithFailure(
        absl::DataLossError(absl::StrCat(status.message(), "; it has ", info.st_size, " bytes now: the source changed while it was read")),
        quern::v1::SOURCE_CHANGED);
  }
  return status;
}

}  // namespace

Engine::Engine(SourceReader* reader, BufferRing* input, int threads, TaskControl* control)
    : reader_(reader), input_(input), control_(control) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Compute(); });
}

void Engine::Stop() {
  bool reading;
  {
    MutexLock lock(&mutex_);
    FailLocked(absl::CancelledError("the task has ended"));
    reading = reading_ > 0;
  }
  if (reading) reader_->Cancel();
  {
    MutexLock lock(&mutex_);
    while (alive_ > 0) ended_.Wait(&mutex_);
    stop_ = true;
    ready_changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Engine::Fail(absl::Status status) {
  MutexLock lock(&mutex_);
  FailLocked(std::move(status));
}

void Engine::FailLocked(absl::Status status) {
  if (failure_.ok()) failure_ = std::move(status);
  ended_.SignalAll();
}

absl::Status Engine::Wait(const std::function<bool(absl::Duration)>& attempt) {
  absl::Duration wait = absl::ZeroDuration();
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (control_->stop) FailLocked(absl::CancelledError("the task was stopped"));
      if (!failure_.ok()) return failure_;
    }
    if (attempt(wait)) return absl::OkStatus();
    wait = kPoll;
  }
}

absl::Status Engine::WaitUntil(const std::function<bool(absl::Duration)>& attempt) {
  const absl::Duration began = Clock::Real()->Monotonic();
  absl::Status status = Wait(attempt);
  MutexLock lock(&mutex_);
  times_.read_stall_seconds += SecondsSince(began);
  return status;
}

absl::StatusOr<PoolBuffer> Engine::AcquireInput(uint64_t size) {
  if (size > input_->largest()) {
    return WithFailure(absl::ResourceExhaustedError(absl::StrCat("a tile of ", size, " bytes does not fit the buffer pool")),
                       quern::v1::MEMORY_TOO_SMALL, 2 * size);
  }
  std::optional<PoolBuffer> buffer;
  QUERN_RETURN_IF_ERROR(WaitUntil([&](absl::Duration timeout) {
    buffer = input_->Acquire(size, timeout);
    return buffer.has_value();
  }));
  return *std::move(buffer);
}

absl::Status Engine::Start(std::unique_ptr<Step> owned) {
  QUERN_RETURN_IF_ERROR(WaitUntil([this](absl::Duration timeout) {
    MutexLock lock(&mutex_);
    if (alive_ >= kMaxSteps) ended_.WaitFor(&mutex_, timeout);
    return alive_ < kMaxSteps;
  }));
  Step* const step = owned.release();
  std::vector<ReadRequest> reads = std::move(step->reads);
  {
    MutexLock lock(&mutex_);
    ++alive_;
    step->sequence = started_++;
    if (step->strand != nullptr) step->turn = step->strand->started++;
    if (step->holds != nullptr) ++step->holds->holders;
    // One blocker more than there are, taken away below: the step cannot end before all its reads are handed over.
    step->blockers = reads.size() + 1;
    for (const std::shared_ptr<Gate>& gate : step->awaits) {
      if (gate->holders == 0) continue;
      ++step->blockers;
      gate->waiting.push_back(step);
    }
    if (!reads.empty() && reading_ == 0) reading_since_ = Clock::Real()->Monotonic();
    reading_ += reads.size();
  }
  for (ReadRequest& read : reads) {
    read.done = [this, step, file = read.file, size = read.size](absl::Status status) { OnRead(step, file, size, std::move(status)); };
    reader_->Read(std::move(read));
  }
  MutexLock lock(&mutex_);
  Unblock(step);
  return absl::OkStatus();
}

void Engine::OnRead(Step* step, const SourceHandle* file, uint64_t size, absl::Status status) {
  if (!status.ok()) status = Annotate(Classify(std::move(status), *file), step->what);
  control_->bytes_read += size;
  MutexLock lock(&mutex_);
  if (--reading_ == 0) times_.read_seconds += SecondsSince(reading_since_);
  if (!status.ok()) FailLocked(std::move(status));
  Unblock(step);
}

void Engine::Unblock(Step* step) {
  if (--step->blockers > 0) return;
  if (step->strand != nullptr && step->turn != step->strand->next) {
    step->strand->waiting.emplace(step->turn, step);
    return;
  }
  ready_.emplace(step->sequence, step);
  ready_changed_.Signal();
}

void Engine::Compute() {
  while (true) {
    Step* step;
    bool run;
    {
      MutexLock lock(&mutex_);
      const absl::Duration began = Clock::Real()->Monotonic();
      while (ready_.empty() && !stop_) ready_changed_.Wait(&mutex_);
      if (ready_.empty()) return;
      times_.compute_stall_seconds += SecondsSince(began);
      step = ready_.begin()->second;
      ready_.erase(ready_.begin());
      run = failure_.ok();
    }
    if (!run) {
      End(step, absl::OkStatus());
      continue;
    }
    const absl::Duration began = Clock::Real()->Monotonic();
    // Taken out first: ending the step deletes it.
    const std::function<void(Step::Done)> compute = std::move(step->compute);
    compute([this, step](absl::Status status) { End(step, std::move(status)); });
    MutexLock lock(&mutex_);
    times_.compute_seconds += SecondsSince(began);
  }
}

void Engine::End(Step* step, absl::Status status) {
  if (!status.ok()) status = Annotate(status, step->what);
  const std::shared_ptr<Strand> strand = std::move(step->strand);
  const std::shared_ptr<Gate> holds = std::move(step->holds);
  step->buffer.Release();
  MutexLock lock(&mutex_);
  if (!status.ok()) FailLocked(std::move(status));
  if (strand != nullptr) {
    ++strand->next;
    if (auto it = strand->waiting.find(strand->next); it != strand->waiting.end()) {
      ready_.emplace(it->second->sequence, it->second);
      strand->waiting.erase(it);
      ready_changed_.Signal();
    }
  }
  if (holds != nullptr && --holds->holders == 0) {
    for (Step* waiting : std::exchange(holds->waiting, {})) Unblock(waiting);
  }
  delete step;
  --alive_;
  ended_.SignalAll();
}

absl::Status Engine::WaitFor(const std::shared_ptr<Gate>& gate) {
  return WaitUntil([&](absl::Duration timeout) {
    MutexLock lock(&mutex_);
    if (gate->holders > 0) ended_.WaitFor(&mutex_, timeout);
    return gate->holders == 0;
  });
}

absl::Status Engine::Drain() {
  QUERN_RETURN_IF_ERROR(Wait([this](absl::Duration timeout) {
    MutexLock lock(&mutex_);
    if (alive_ > 0) ended_.WaitFor(&mutex_, timeout);
    return alive_ == 0;
  }));
  MutexLock lock(&mutex_);
  return failure_;
}

Engine::Times Engine::times() const {
  MutexLock lock(&mutex_);
  return times_;
}

}  // namespace quern::worker
