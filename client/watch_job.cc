#include "client/watch_job.h"

#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/text_check.h"
#include "client/connection.h"

namespace quern::client {
namespace {

using quern::v1::Job;

constexpr absl::Duration kTick = absl::Milliseconds(50);
constexpr absl::Duration kInterval = absl::Milliseconds(250);
constexpr absl::Duration kReconnectFor = absl::Minutes(1);

// Reads the stream on a thread of its own. Thread-safe; the destructor ends the stream.
class JobStream {
 public:
  JobStream(quern::v1::Jobs::Stub& jobs, const std::string& name) {
    request_.set_name(name);
    request_.mutable_interval()->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(kInterval)));
    thread_ = std::thread([this, &jobs] { Read(jobs); });
  }
  ~JobStream() {
    context_.TryCancel();
    thread_.join();
  }

  struct Event {
    std::optional<Job> job;             // newer than the last one taken
    std::optional<absl::Status> ended;  // of the stream
  };
  // Waits up to a tick for something to happen.
  Event Next() {
    MutexLock lock(&mutex_);
    if (!job_ && !ended_) changed_.WaitFor(&mutex_, kTick);
    return {std::exchange(job_, std::nullopt), ended_};
  }

 private:
  void Read(quern::v1::Jobs::Stub& jobs) {
    const auto reader = jobs.WatchJob(&context_, request_);
    Job job;
    while (reader->Read(&job)) {
      MutexLock lock(&mutex_);
      job_ = job;
      changed_.SignalAll();
    }
    const absl::Status status = FromGrpc(reader->Finish());
    MutexLock lock(&mutex_);
    ended_ = status;
    changed_.SignalAll();
  }

  quern::v1::WatchJobRequest request_;
  grpc::ClientContext context_;
  std::thread thread_;
  Mutex mutex_;
  CondVar changed_;
  std::optional<Job> job_ QUERN_GUARDED_BY(mutex_);
  std::optional<absl::Status> ended_ QUERN_GUARDED_BY(mutex_);
};

absl::Duration TimeBetween(const google::protobuf::Timestamp& from, const google::protobuf::Timestamp& to) {
  return absl::Seconds(to.seconds() - from.seconds()) + absl::Nanoseconds(to.nanos() - from.nanos());
}

uint64_t Growth(uint64_t before, uint64_t now) { return now > before ? now - before : 0; }

}  // namespace

absl::StatusOr<WatchOutcome> WatchJob(quern::v1::Jobs::Stub& jobs, const Job& job, PrivateFarm* farm, Interrupt& interrupt,
                                      Progress& progress, Clock* clock) {
  const std::string name = job.name();
  const absl::Duration start = clock->Monotonic();
  absl::Duration last_heard = start;
  WatchOutcome outcome;
  outcome.job = job;
  const quern::v1::Progress before = job.progress();
  bool draining = false;
  bool told_lost = false;
  std::string waits_for;
  const auto tell_waiting = [&] {
    // The worker of a private farm is on its way.
    if (farm != nullptr || outcome.job.waits_for() == waits_for) return;
    waits_for = outcome.job.waits_for();
    if (!waits_for.empty()) progress.Message(absl::StrCat("waits for ", OneLine(waits_for, waits_for.size())));
  };
  tell_waiting();
  auto stream = std::make_unique<JobStream>(jobs, name);
  while (!HasEnded(outcome.job)) {
    JobStream::Event event = stream->Next();
    if (event.job) {
      outcome.job = *std::move(event.job);
      last_heard = clock->Monotonic();
      told_lost = false;
      progress.Update(outcome.job);
      tell_waiting();
    } else if (event.ended) {
      if (farm != nullptr) return farm->ExplainLostConnection(*event.ended);
      const bool transient = event.ended->ok() || event.ended->code() == absl::StatusCode::kUnavailable;
      if (!transient || clock->Monotonic() - last_heard > kReconnectFor) return *event.ended;
      if (!told_lost) progress.Message("the connection to the coordinator is lost; trying again (the job itself goes on)");
      told_lost = true;
      std::this_thread::sleep_for(absl::ToChronoMilliseconds(kInterval));
      stream = std::make_unique<JobStream>(jobs, name);
    }
    if (farm != nullptr) {
      std::string restarted;
      QUERN_RETURN_IF_ERROR(farm->Check(outcome.job.progress().tasks_done(), &restarted));
      if (!restarted.empty()) progress.Message(restarted);
    }
    if (!interrupt.requested()) continue;
    outcome.interrupted = true;
    if (farm == nullptr) break;
    // What is being published is published: that is quick, and every step of it may be done again.
    if (outcome.job.state() == Job::PUBLISHING) continue;
    if (!draining) {
      progress.Message(absl::StrCat(
          "stopping: ",
          job.spec().has_verify() ? "the files that are being checked are finished first" : "the shards in flight are finished first",
          "; press Ctrl-C again to abort"));
      QUERN_RETURN_IF_ERROR(farm->DrainWorker());
      draining = true;
    }
    if (!farm->worker_running()) break;
  }
  progress.Clear();
  if (HasEnded(outcome.job)) outcome.interrupted = false;
  outcome.elapsed = clock->Monotonic() - start;
  if (HasEnded(job)) {
    // There was nothing to watch: what the job did all in all.
    outcome.elapsed = TimeBetween(job.create_time(), job.end_time());
    outcome.bytes_read = job.progress().bytes_read();
    outcome.bytes_written = job.progress().bytes_written();
    return outcome;
  }
  outcome.bytes_read = Growth(before.bytes_read(), outcome.job.progress().bytes_read());
  outcome.bytes_written = Growth(before.bytes_written(), outcome.job.progress().bytes_written());
  return outcome;
}

}  // namespace quern::client
