#include "worker/executor/executor.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/executor/framing.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptId;
using quern::v1::AttemptStatus;

// Sure to go before the supervisor, whose score is that of its own parents.
constexpr int kOomScoreRaise = 500;

bool SameAttempt(const AttemptId& a, const AttemptId& b) {
  return a.task() == b.task() && a.attempt() == b.attempt() && a.job() == b.job();
}

// One attempt on a thread of its own.
class RunningAttempt {
 public:
  RunningAttempt(int channel, Mutex* write_mutex, const ExecutorHooks* hooks, quern::v1::StartAttempt start)
      : channel_(channel), write_mutex_(write_mutex), hooks_(hooks), start_(std::move(start)), thread_([this] { Run(); }) {}
  ~RunningAttempt() { thread_.join(); }

  const AttemptId& id() const { return start_.id(); }
  void Stop() { control_.stop = true; }
  // The last event has been sent, or could not be.
  bool ended() const { return ended_; }

  // Does nothing once the attempt has ended.
  absl::Status SendProgress() {
    MutexLock lock(write_mutex_);
    if (ended_) return absl::OkStatus();
    quern::v1::ExecutorEvent event;
    FillStatus(AttemptStatus::RUNNING, event.mutable_status());
    return WriteFrame(channel_, event);
  }

 private:
  void FillStatus(AttemptStatus::State state, AttemptStatus* status) {
    *status->mutable_id() = start_.id();
    status->set_state(state);
    status->set_memory(start_.memory());
    status->set_bytes_read(control_.bytes_read);
    status->set_bytes_written(control_.bytes_written);
  }

  void Run() {
    absl::StatusOr<quern::v1::TaskResult> result = hooks_->run(start_, &control_);
    // The pool's pages go back before the next attempt, which may have to live with less.
    malloc_trim(0);
    quern::v1::ExecutorEvent event;
    AttemptStatus* status = event.mutable_status();
    if (result.ok()) {
      FillStatus(AttemptStatus::COMPLETED, status);
      *status->mutable_times() = result->times();
      *status->mutable_result() = *std::move(result);
    } else if (control_.stop && absl::IsCancelled(result.status())) {
      FillStatus(AttemptStatus::STOPPED, status);
    } else {
      FillStatus(AttemptStatus::FAILED, status);
      *status->mutable_failure() = hooks_->failure_of(result.status());
    }
    MutexLock lock(write_mutex_);
    ended_ = true;
    // Without a peer the main thread ends the process.
    if (const absl::Status sent = WriteFrame(channel_, event); absl::IsResourceExhausted(sent)) {
      FillStatus(AttemptStatus::FAILED, status);
      status->clear_result();
      *status->mutable_failure() = hooks_->failure_of(absl::InternalError(sent.message()));
      WriteFrame(channel_, event).IgnoreError();
    }
  }

  const int channel_;
  Mutex* const write_mutex_;
  const ExecutorHooks* const hooks_;
  const quern::v1::StartAttempt start_;
  TaskControl control_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

// Whether the channel has something to read (or has ended) within `timeout`; a negative one waits forever.
absl::StatusOr<bool> WaitReadable(int channel, absl::Duration timeout) {
  pollfd entry = {channel, POLLIN, 0};
  const int milliseconds = timeout < absl::ZeroDuration() ? -1 : static_cast<int>(absl::ToInt64Milliseconds(timeout));
  const int ready = poll(&entry, 1, milliseconds);
  if (ready < 0 && errno != EINTR) return ErrnoToStatus(errno, "poll", "executor channel");
  return ready > 0;
}

}  // namespace

absl::Status RunExecutor(UniqueFd channel, const ExecutorHooks& hooks, absl::Duration progress_interval) {
  Mutex write_mutex;
  std::unique_ptr<RunningAttempt> attempt;
  while (true) {
    if (attempt != nullptr && attempt->ended()) attempt.reset();
    QUERN_ASSIGN_OR_RETURN(const bool readable,
                           WaitReadable(channel.get(), attempt != nullptr ? progress_interval : -absl::InfiniteDuration()));
    if (!readable) {
      // A channel that takes no progress has closed; reading it says so.
      if (attempt != nullptr) attempt->SendProgress().IgnoreError();
      continue;
    }
    quern::v1::ExecutorCommand command;
    const absl::StatusOr<bool> more = ReadFrame(channel.get(), &command);
    if (!more.ok() || !*more) {
      if (attempt != nullptr && !attempt->ended()) _exit(0);
      return more.status();
    }
    if (command.has_start()) {
      if (attempt != nullptr && !attempt->ended()) {
        quern::v1::ExecutorEvent event;
        *event.mutable_status()->mutable_id() = command.start().id();
        event.mutable_status()->set_state(AttemptStatus::FAILED);
        event.mutable_status()->set_memory(command.start().memory());
        *event.mutable_status()->mutable_failure() =
            hooks.failure_of(absl::InternalError("the executor was given a second attempt while one runs"));
        MutexLock lock(&write_mutex);
        WriteFrame(channel.get(), event).IgnoreError();
      } else {
        attempt.reset();
        attempt = std::make_unique<RunningAttempt>(channel.get(), &write_mutex, &hooks, std::move(*command.mutable_start()));
        attempt->SendProgress().IgnoreError();
      }
    } else if (command.has_stop() && attempt != nullptr && SameAttempt(attempt->id(), command.stop().id())) {
      attempt->Stop();
    }
  }
}

void PrepareExecutorProcess() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGTERM, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  // Raising one's own score needs no privilege. Where /proc is not writable the worker still works, only the choice is the kernel's.
  constexpr char kPath[] = "/proc/self/oom_score_adj";
  const absl::StatusOr<std::string> text = ReadKernelFile(kPath);
  int score = 0;
  if (!text.ok() || !absl::SimpleAtoi(*text, &score)) return;
  const std::string raised = absl::StrCat(std::min(1000, score + kOomScoreRaise));
  if (absl::StatusOr<UniqueFd> file = OpenFile(kPath, O_WRONLY); file.ok()) {
    WriteExactly(file->get(), 0, raised.data(), raised.size(), kPath).IgnoreError();
  }
}

}  // namespace quern::worker
