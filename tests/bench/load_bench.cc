// The coordinator under load: the real quernd over a unix socket, with simulated workers that each have a connection of their own, hold
// attempts, write their files and report them. Prints each figure beside its bar and beside what the disk did meanwhile; see
// docs/testing.md.
//
//   load_bench --quernd build/release/daemon/quernd [--dir DIR] [--workers 1000] [--tasks 100000] [--seconds 10]
//
// Offered load: renewals come at the rate at which workers send them, one a second each, and a latency is that of the call. What is asked
// for at full speed (transitions a second) has no latency worth printing: it is the length of the queue. The workers' files lie in memory
// where there is a /dev/shm: on a farm they are other machines' work, and here their creation would share the journal of the store.
#include <errno.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/subprocess.h"
#include "quant/numerics_version.h"
#include "quern/v1/jobs.grpc.pb.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern {
namespace {

using quern::v1::AttemptStatus;
using quern::v1::SynchronizeRequest;
using quern::v1::SynchronizeResponse;

struct Flags {
  std::string quernd;
  std::string directory;
  std::string shards;
  int workers = 1000;
  int tasks = 100'000;
  int seconds = 10;
  int commits_per_second = 200;
  std::vector<std::string> phases = {"renewals", "commits", "throughput", "restart", "ready"};
};

absl::Duration Now() { return Clock::Real()->Monotonic(); }

// Thread-safe.
class Latencies {
 public:
  void Add(absl::Duration latency) {
    MutexLock lock(&mutex_);
    all_.push_back(latency);
  }
  size_t count() {
    MutexLock lock(&mutex_);
    return all_.size();
  }
  absl::Duration Percentile(double percent) {
    MutexLock lock(&mutex_);
    if (all_.empty()) return absl::InfiniteDuration();
    std::sort(all_.begin(), all_.end());
    return all_[std::min(all_.size() - 1, static_cast<size_t>(percent / 100 * static_cast<double>(all_.size())))];
  }

 private:
  Mutex mutex_;
  std::vector<absl::Duration> all_ QUERN_GUARDED_BY(mutex_);
};

std::string Milliseconds(absl::Duration duration) {
  char text[32];
  snprintf(text, sizeof(text), "%.2f ms", absl::ToDoubleMilliseconds(duration));
  return text;
}

void Tell(const std::string& what, const std::string& value) { printf("    %-66s %18s\n", what.c_str(), value.c_str()); }

void Judge(const std::string& what, const std::string& value, const std::string& bar, bool met) {
  printf("  * %-66s %18s   %-6s  bar: %s\n", what.c_str(), value.c_str(), met ? "met" : "MISSED", bar.c_str());
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), std::string(status.error_message()));
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// One worker with one slot. Not thread-safe, apart from what gRPC's threads do between Call and its `done`.
class SimulatedWorker {
 public:
  SimulatedWorker(const std::string& address, int number)
      : stub_(quern::v1::Workers::NewStub(Connect(address))), name_(absl::StrCat("w", number)) {}

  bool has_attempt() const { return status_.state() == AttemptStatus::RUNNING; }

  SynchronizeRequest Request(uint32_t slots, bool may_wait) const {
    SynchronizeRequest request;
    // Who has left comes back by another name, as a worker without --name does: by the same one it would be kept from the task for a while.
    request.set_worker(absl::StrCat(name_, "-", incarnation_));
    request.set_incarnation(absl::StrCat(name_, "-incarnation-", incarnation_));
    request.set_host("bench");
    request.set_version("1");
    request.set_numerics_version(quant::kNumericsVersion);
    request.set_slots(slots);
    request.set_threads(1);
    request.set_memory(64 * kMiB);
    quern::v1::Device& device = *request.add_devices();
    device.set_kind("cpu");
    device.set_self_test_passed(true);
    request.set_may_wait(may_wait);
    // Given back by one that stays, it would count as a failure.
    request.set_draining(status_.state() == AttemptStatus::STOPPED);
    if (status_.has_id()) *request.add_attempts() = status_;
    return request;
  }

  // `done` runs on a thread of gRPC.
  void Call(SynchronizeRequest request, std::function<void(absl::Status, absl::Duration)> done) {
    for (quern::v1::SightAnswer& answer : sight_) *request.add_sight() = std::move(answer);
    sight_.clear();
    request_ = std::move(request);
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_wait_for_ready(true);
    response_.Clear();
    const absl::Duration start = Now();
    stub_->async()->Synchronize(context_.get(), &request_, &response_, [this, start, done = std::move(done)](grpc::Status status) {
      const absl::Duration latency = Now() - start;
      absl::Status result = FromGrpc(status);
      if (result.ok()) result = Learn();
      done(result, latency);
    });
  }

  // What it runs is done: the file is what the plan says, as far as the coordinator looks at it.
  absl::Status Finish() {
    const quern::v1::WriteShard& shard = spec_.write_shard();
    if (!output_path_.empty()) {
      const UniqueFd fd(open(output_path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
      if (!fd || pwrite(fd.get(), shard.header().data(), shard.header().size(), 0) != static_cast<ssize_t>(shard.header().size()) ||
          ftruncate(fd.get(), static_cast<off_t>(shard.file_size())) != 0) {
        return ErrnoToStatus(errno, "write", output_path_);
      }
    }
    status_.set_state(AttemptStatus::COMPLETED);
    quern::v1::TaskResult& result = *status_.mutable_result();
    result.set_file_size(shard.file_size());
    result.set_header_sha256(Sha256Of(shard.header()));
    result.set_sha256(std::string(32, 's'));
    result.set_bytes_written(shard.file_size());
    result.mutable_times()->set_wall_seconds(1);
    return absl::OkStatus();
  }
  void GiveBack() { status_.set_state(AttemptStatus::STOPPED); }
  void Cancel() {
    if (context_ != nullptr) context_->TryCancel();
  }

 private:
  absl::Status Learn() {
    for (const auto& id : response_.acknowledged()) {
      if (status_.has_id() && id.task() == status_.id().task() && id.attempt() == status_.id().attempt() &&
          id.job() == status_.id().job()) {
        if (status_.state() == AttemptStatus::STOPPED) ++incarnation_;
        status_.Clear();
      }
    }
    for (auto& attempt : *response_.mutable_attempts()) {
      if (!attempt.has_spec()) continue;
      status_.Clear();
      *status_.mutable_id() = attempt.id();
      status_.set_state(AttemptStatus::RUNNING);
      status_.set_purpose(attempt.purpose());
      spec_ = std::move(*attempt.mutable_spec());
      output_path_ = attempt.output_path();
    }
    for (const quern::v1::SightChallenge& challenge : response_.challenges()) {
      quern::v1::SightAnswer& answer = sight_.emplace_back();
      answer.set_job(challenge.job());
      answer.set_what(challenge.what());
      answer.set_nonce(challenge.nonce());
      QUERN_ASSIGN_OR_RETURN(const std::string content, ReadFileToString(challenge.path()));
      Sha256 sha;
      sha.Update(challenge.nonce());
      for (const uint64_t offset : challenge.offsets()) sha.Update(absl::string_view(content).substr(offset, 4096));
      answer.set_seen(true);
      answer.set_digest(sha.Finish());
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<quern::v1::Workers::Stub> stub_;
  const std::string name_;
  int incarnation_ = 0;
  AttemptStatus status_;
  quern::v1::TaskSpec spec_;
  std::string output_path_;
  std::vector<quern::v1::SightAnswer> sight_;
  std::unique_ptr<grpc::ClientContext> context_;
  SynchronizeRequest request_;
  SynchronizeResponse response_;
};

// Waits for calls that were started.
class Outstanding {
 public:
  void Begin() {
    MutexLock lock(&mutex_);
    ++count_;
  }
  void End(const absl::Status& status) {
    MutexLock lock(&mutex_);
    if (!status.ok() && error_.ok()) error_ = status;
    --count_;
    changed_.SignalAll();
  }
  absl::Status Wait() {
    MutexLock lock(&mutex_);
    while (count_ > 0) changed_.Wait(&mutex_);
    return error_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int count_ QUERN_GUARDED_BY(mutex_) = 0;
  absl::Status error_ QUERN_GUARDED_BY(mutex_);
};

// What the disk does in the meantime: a thread that appends 4 KiB and syncs, fifty times a second.
class SyncProbe {
 public:
  explicit SyncProbe(const std::string& path) : thread_([this, path] { Run(path); }) {}
  ~SyncProbe() { Stop(); }
  absl::Duration StopAndTell(double percent) {
    Stop();
    return Tell(percent);
  }
  absl::Duration Tell(double percent) { return latencies_.Percentile(percent); }

 private:
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void Run(const std::string& path) {
    const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    const std::string block(4096, 'x');
    while (!stop_ && fd) {
      if (write(fd.get(), block.data(), block.size()) != static_cast<ssize_t>(block.size())) return;
      const absl::Duration start = Now();
      if (fdatasync(fd.get()) != 0) return;
      latencies_.Add(Now() - start);
      absl::SleepFor(absl::Milliseconds(20));
    }
  }
  std::atomic<bool> stop_ = false;
  Latencies latencies_;
  std::thread thread_;
};

uint64_t MemoryOf(pid_t pid, absl::string_view field) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string text; std::getline(file, text);) {
    absl::string_view line = text;
    if (!absl::ConsumePrefix(&line, field)) continue;
    uint64_t kilobytes = 0;
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(": \t"), absl::SkipEmpty());
    if (!words.empty() && absl::SimpleAtoi(words[0], &kilobytes)) return kilobytes * 1024;
  }
  return 0;
}

// Seconds of processor time: of a process (its /proc/PID/stat), or, with no process, of all (/proc/stat, without what was idle).
double ProcessorSeconds(pid_t pid) {
  std::ifstream file(pid == 0 ? "/proc/stat" : absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  if (pid != 0) text.erase(0, text.rfind(')') + 1);
  const std::vector<std::string> fields = absl::StrSplit(text, ' ', absl::SkipEmpty());
  // user, nice, system, irq, softirq, steal of all; utime and stime, fields 14 and 15, of one.
  const std::vector<size_t> wanted = pid == 0 ? std::vector<size_t>{1, 2, 3, 6, 7, 8} : std::vector<size_t>{11, 12};
  uint64_t ticks = 0;
  for (const size_t i : wanted) {
    uint64_t value = 0;
    if (i < fields.size() && absl::SimpleAtoi(fields[i], &value)) ticks += value;
  }
  return static_cast<double>(ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Who used the processors from its making on.
class Processors {
 public:
  explicit Processors(pid_t quernd) : quernd_(quernd), begun_(Now()), before_(Read()) {}
  void Print() const {
    const std::array<double, 3> now = Read();
    const double seconds = absl::ToDoubleSeconds(Now() - begun_);
    const double quernd = (now[0] - before_[0]) / seconds, self = (now[1] - before_[1]) / seconds, all = (now[2] - before_[2]) / seconds;
    char text[128];
    snprintf(text, sizeof(text), "%.2f + %.2f + %.2f", quernd, self, std::max(0.0, all - quernd - self));
    Tell(absl::StrCat("cores of ", sysconf(_SC_NPROCESSORS_ONLN), " used by quernd + this bench + others"), text);
  }

 private:
  std::array<double, 3> Read() const { return {ProcessorSeconds(quernd_), ProcessorSeconds(getpid()), ProcessorSeconds(0)}; }
  const pid_t quernd_;
  const absl::Duration begun_;
  const std::array<double, 3> before_;
};

class Bench {
 public:
  explicit Bench(Flags flags) : flags_(std::move(flags)), address_(absl::StrCat("unix:", flags_.directory, "/s")) {}

  absl::Status Run() {
    QUERN_RETURN_IF_ERROR(Start({"--state-dir", JoinPath(flags_.directory, "state")}));
    const absl::Duration begun = Now();
    QUERN_ASSIGN_OR_RETURN(const std::string big, Create("big", static_cast<uint32_t>(std::max(1, flags_.tasks / 1000)), 1000));
    uint32_t tasks = 0;
    QUERN_RETURN_IF_ERROR(Get(big, &tasks));
    printf("%d workers with a connection each, a job of %u tasks (planned and stored in %.1f s); state in %s, shards in %s\n",
           flags_.workers, tasks, absl::ToDoubleSeconds(Now() - begun), flags_.directory.c_str(), flags_.shards.c_str());
    QUERN_RETURN_IF_ERROR(GrantAll());
    if (Wants("renewals")) QUERN_RETURN_IF_ERROR(Renewals());
    if (Wants("commits")) QUERN_RETURN_IF_ERROR(Commits());
    if (Wants("throughput")) QUERN_RETURN_IF_ERROR(Throughput());
    printf("memory\n");
    const uint64_t rss = MemoryOf(quernd_->pid(), "VmRSS"), peak = MemoryOf(quernd_->pid(), "VmHWM");
    Tell("coordinator RSS after the load", FormatByteSize(rss));
    Judge("coordinator RSS, largest (while it planned)", FormatByteSize(peak), "under 1 GiB", peak < kGiB);
    if (Wants("restart")) QUERN_RETURN_IF_ERROR(Restart(big));
    if (!Wants("ready")) return absl::OkStatus();
    QUERN_RETURN_IF_ERROR(ReadyToGrant(big, true));
    QUERN_RETURN_IF_ERROR(Stop());
    QUERN_RETURN_IF_ERROR(Start({"--in-memory"}));
    MakeWorkers();
    return ReadyToGrant("", false);
  }

 private:
  bool Wants(const std::string& phase) const { return std::find(flags_.phases.begin(), flags_.phases.end(), phase) != flags_.phases.end(); }

  std::unique_ptr<SyncProbe> StartProbe() const { return std::make_unique<SyncProbe>(JoinPath(flags_.directory, "probe")); }

  // What the probe saw; returns the bar of what is synced.
  static absl::Duration TellSyncs(SyncProbe& probe) {
    const absl::Duration p99 = probe.StopAndTell(99);
    Tell("fdatasync of 4 KiB beside the state meanwhile: p50", Milliseconds(probe.Tell(50)));
    Tell("fdatasync of 4 KiB beside the state meanwhile: p99, longest",
         absl::StrCat(Milliseconds(p99), ", ", Milliseconds(probe.Tell(100))));
    return 3 * p99;
  }

  absl::Status Start(const std::vector<std::string>& state) {
    Subprocess::Options options;
    options.argv = {flags_.quernd, "--listen", address_, "--allow-root", flags_.directory, "--allow-root", flags_.shards};
    options.argv.insert(options.argv.end(), state.begin(), state.end());
    options.log_path = JoinPath(flags_.directory, "quernd.log");
    QUERN_ASSIGN_OR_RETURN(Subprocess process, Subprocess::Spawn(options));
    quernd_ = std::make_unique<Subprocess>(std::move(process));
    jobs_ = quern::v1::Jobs::NewStub(Connect(address_));
    for (int i = 0; i < 3000; ++i) {
      grpc::ClientContext context;
      quern::v1::ListJobsResponse response;
      if (jobs_->ListJobs(&context, quern::v1::ListJobsRequest(), &response).ok()) return absl::OkStatus();
      ExitState ended;
      QUERN_ASSIGN_OR_RETURN(const bool gone, quernd_->Poll(&ended));
      if (gone) return absl::UnavailableError(absl::StrCat("quernd ended: ", ended.ToString(), "; see ", options.log_path));
      absl::SleepFor(absl::Milliseconds(10));
    }
    return absl::UnavailableError("quernd does not answer");
  }

  absl::Status Stop() {
    QUERN_RETURN_IF_ERROR(quernd_->Kill(SIGKILL));
    return quernd_->Wait().status();
  }

  absl::StatusOr<std::string> Create(const std::string& name, uint32_t layers, uint32_t experts) {
    quern::v1::CreateJobRequest request;
    request.set_request_id(absl::StrCat(name, getpid()));
    request.mutable_spec()->set_operation(quern::v1::SYNTHESIZE);
    request.mutable_spec()->set_output(JoinPath(flags_.shards, name));
    quern::v1::SynthesizeSpec& spec = *request.mutable_spec()->mutable_synthesize();
    spec.set_family("laguna");
    spec.set_layers(layers);
    spec.set_experts(experts);
    spec.set_hidden(64);
    spec.set_intermediate(64);
    spec.set_vocab(64);
    spec.set_max_shard_size(8192);  // below any set of weights: each has a shard of its own
    grpc::ClientContext context;
    quern::v1::Job job;
    QUERN_RETURN_IF_ERROR(FromGrpc(jobs_->CreateJob(&context, request, &job)));
    return job.name();
  }

  absl::Status Get(const std::string& name, uint32_t* tasks) {
    quern::v1::ListJobsResponse response;
    grpc::ClientContext context;
    QUERN_RETURN_IF_ERROR(FromGrpc(jobs_->ListJobs(&context, quern::v1::ListJobsRequest(), &response)));
    for (const quern::v1::Job& job : response.jobs()) {
      if (job.name() == name) *tasks = job.progress().tasks_total();
    }
    return absl::OkStatus();
  }

  // Calls of `workers`, all at once, until each has what `until` wants of it.
  absl::Status All(const std::function<bool(const SimulatedWorker&)>& until, uint32_t slots) {
    for (int round = 0; round < 20; ++round) {
      Outstanding calls;
      bool any = false;
      for (auto& worker : workers_) {
        if (until(*worker)) continue;
        any = true;
        calls.Begin();
        worker->Call(worker->Request(slots, false), [&calls](absl::Status status, absl::Duration) { calls.End(status); });
      }
      QUERN_RETURN_IF_ERROR(calls.Wait());
      if (!any) return absl::OkStatus();
    }
    return absl::InternalError("workers do not get what they should");
  }

  void MakeWorkers() {
    granted_.clear();
    workers_.clear();
    for (int i = 0; i < flags_.workers; ++i) workers_.push_back(std::make_unique<SimulatedWorker>(address_, i));
  }

  absl::Status GrantAll() {
    MakeWorkers();
    const absl::Duration begun = Now();
    QUERN_RETURN_IF_ERROR(All([](const SimulatedWorker& worker) { return worker.has_attempt(); }, 1));
    Tell("all workers at once: connected, proved and granted", absl::FormatDuration(absl::Trunc(Now() - begun, absl::Milliseconds(1))));
    return absl::OkStatus();
  }

  // Each worker calls once a second, spread evenly; `per_second` of the calls report a finished task and get the next one.
  absl::Status Paced(int per_second, Latencies* renewals, Latencies* commits) {
    Outstanding calls;
    const Processors processors(quernd_->pid());
    const absl::Duration begun = Now();
    const absl::Duration gap = absl::Seconds(1) / flags_.workers;
    const int every = per_second == 0 ? 0 : std::max(1, flags_.workers / per_second);
    std::vector<std::atomic<bool>> busy(workers_.size());
    int skipped = 0;
    absl::Status error;
    for (int64_t i = 0; i < int64_t{flags_.seconds} * flags_.workers && error.ok(); ++i) {
      const absl::Duration wait = begun + i * gap - Now();
      if (wait > absl::ZeroDuration()) absl::SleepFor(wait);
      const size_t index = i % workers_.size();
      SimulatedWorker& worker = *workers_[index];
      if (busy[index].exchange(true)) {  // its last call is still out
        ++skipped;
        continue;
      }
      // Each second others.
      const bool commit = every > 0 && (i + i / flags_.workers) % every == 0 && worker.has_attempt();
      if (commit) error = worker.Finish();
      calls.Begin();
      worker.Call(worker.Request(1, false), [&, commit, index](absl::Status status, absl::Duration latency) {
        (commit ? commits : renewals)->Add(latency);
        busy[index] = false;
        calls.End(status);
      });
    }
    const absl::Duration took = Now() - begun;
    const absl::Status waited = calls.Wait();
    QUERN_RETURN_IF_ERROR(error);
    QUERN_RETURN_IF_ERROR(waited);
    Tell("calls a second, offered and made",
         absl::StrCat(
             flags_.workers, ", ",
             static_cast<int64_t>(static_cast<double>(int64_t{flags_.seconds} * flags_.workers - skipped) / absl::ToDoubleSeconds(took))));
    if (skipped > 0) Tell("calls left out: the worker's last one was still out after a second", absl::StrCat(skipped));
    processors.Print();
    return absl::OkStatus();
  }

  void JudgeRenewals(Latencies& renewals) {
    Tell("a renewal: p50, longest", absl::StrCat(Milliseconds(renewals.Percentile(50)), ", ", Milliseconds(renewals.Percentile(100))));
    Judge("a renewal: p99", Milliseconds(renewals.Percentile(99)), "under 10 ms", renewals.Percentile(99) < absl::Milliseconds(10));
  }

  absl::Status Renewals() {
    printf("renewals alone\n");
    Latencies renewals;
    const std::unique_ptr<SyncProbe> probe = StartProbe();
    QUERN_RETURN_IF_ERROR(Paced(0, &renewals, nullptr));
    TellSyncs(*probe);
    JudgeRenewals(renewals);
    return absl::OkStatus();
  }

  absl::Status Commits() {
    printf("renewals beside %d commits a second\n", flags_.commits_per_second);
    Latencies renewals, commits;
    const std::unique_ptr<SyncProbe> probe = StartProbe();
    QUERN_RETURN_IF_ERROR(Paced(flags_.commits_per_second, &renewals, &commits));
    const absl::Duration bar = TellSyncs(*probe);
    JudgeRenewals(renewals);
    Tell("report of a task until the next is granted: p50, longest",
         absl::StrCat(Milliseconds(commits.Percentile(50)), ", ", Milliseconds(commits.Percentile(100))));
    Judge("report of a task until the next is granted, both synced: p99", Milliseconds(commits.Percentile(99)),
          absl::StrCat("under 3 x fdatasync p99 = ", Milliseconds(bar)), commits.Percentile(99) < bar);
    return absl::OkStatus();
  }

  // Every worker reports and takes the next task as fast as it is answered.
  absl::Status Throughput() {
    printf("all workers at full speed\n");
    Outstanding calls;
    std::atomic<int64_t> transitions = 0;
    const Processors processors(quernd_->pid());
    const std::unique_ptr<SyncProbe> probe = StartProbe();
    const absl::Duration begun = Now(), end = begun + absl::Seconds(flags_.seconds);
    std::function<void(SimulatedWorker*)> next = [&](SimulatedWorker* worker) {
      absl::Status finished;
      if (worker->has_attempt()) finished = worker->Finish();
      worker->Call(worker->Request(1, false), [&, worker, finished](absl::Status status, absl::Duration) {
        if (status.ok()) status = finished;
        // The end of one task and the grant of another.
        if (status.ok() && worker->has_attempt()) transitions += 2;
        if (status.ok() && Now() < end) return next(worker);
        calls.End(status);
      });
    };
    for (auto& worker : workers_) {
      calls.Begin();
      next(worker.get());
    }
    QUERN_RETURN_IF_ERROR(calls.Wait());
    const double rate = static_cast<double>(transitions) / absl::ToDoubleSeconds(Now() - begun);
    processors.Print();
    TellSyncs(*probe);
    Judge("synced transitions a second", absl::StrCat(static_cast<int64_t>(rate)), "5000", rate >= 5000);
    return absl::OkStatus();
  }

  // Nobody holds an attempt of the job, and none is to be had.
  absl::Status Pause(const std::string& name) {
    grpc::ClientContext pause_context;
    quern::v1::PauseJobRequest pause;
    pause.set_name(name);
    quern::v1::Job job;
    QUERN_RETURN_IF_ERROR(FromGrpc(jobs_->PauseJob(&pause_context, pause, &job)));
    for (auto& worker : workers_) {
      if (worker->has_attempt()) worker->GiveBack();
    }
    // The second round is for those that the first told what they did not know.
    for (int round = 0; round < 2; ++round) {
      Outstanding calls;
      for (auto& worker : workers_) {
        if (worker->has_attempt()) worker->GiveBack();
        calls.Begin();
        worker->Call(worker->Request(0, false), [&calls](absl::Status status, absl::Duration) { calls.End(status); });
      }
      QUERN_RETURN_IF_ERROR(calls.Wait());
    }
    return absl::OkStatus();
  }

  // A task is given back; until its next grant reaches a worker whose call waits among all others. `synced`: the grant is written first.
  absl::Status ReadyToGrant(const std::string& big, bool synced) {
    printf("a task becomes ready while %zu calls wait, %s\n", workers_.size(),
           synced ? "its grant is synced" : "nothing is written (state in memory)");
    if (!big.empty()) QUERN_RETURN_IF_ERROR(Pause(big));
    QUERN_RETURN_IF_ERROR(Create(synced ? "small" : "small-in-memory", 1, 1).status());
    // All wait, each with one long call, and prove on the way that they see the new job's output.
    Mutex mutex;
    CondVar changed;
    SimulatedWorker* holder = nullptr;
    bool stop = false;
    absl::Status error;
    Outstanding calls;
    std::function<void(SimulatedWorker*)> wait = [&](SimulatedWorker* worker) {
      worker->Call(worker->Request(1, !worker->has_attempt()), [&, worker](absl::Status status, absl::Duration) {
        {
          MutexLock lock(&mutex);
          if (worker->has_attempt()) {
            granted_.insert(worker);
            holder = worker;
            changed.SignalAll();
            calls.End(absl::OkStatus());
            return;
          }
          if (stop || !status.ok()) {
            calls.End(absl::OkStatus());
            return;
          }
        }
        wait(worker);
      });
    };
    for (auto& worker : workers_) {
      calls.Begin();
      wait(worker.get());
    }
    absl::SleepFor(absl::Seconds(2));  // until all wait
    // One task goes round; the others are done, so that no lease of theirs ends meanwhile.
    {
      MutexLock lock(&mutex);
      Outstanding done;
      while (granted_.size() > 1) {
        SimulatedWorker* const worker = *granted_.begin();
        granted_.erase(granted_.begin());
        QUERN_RETURN_IF_ERROR(worker->Finish());
        done.Begin();
        worker->Call(worker->Request(0, false), [&done](absl::Status status, absl::Duration) { done.End(status); });
      }
      QUERN_RETURN_IF_ERROR(done.Wait());
    }
    Latencies latencies;
    const std::unique_ptr<SyncProbe> probe = StartProbe();
    // In the first rounds all prove that they see the files.
    constexpr int kWarmUp = 5;
    const absl::Duration gap = absl::Milliseconds(10), begun = Now();
    for (int i = 0; i < flags_.seconds * 100 + kWarmUp && error.ok(); ++i) {
      if (const absl::Duration wait = begun + i * gap - Now(); wait > absl::ZeroDuration()) absl::SleepFor(wait);
      SimulatedWorker* giver = nullptr;
      {
        MutexLock lock(&mutex);
        if (granted_.empty()) break;
        giver = *granted_.begin();
        granted_.erase(granted_.begin());
        holder = nullptr;
      }
      giver->GiveBack();
      SynchronizeRequest request = giver->Request(0, false);
      Outstanding given;
      given.Begin();
      const absl::Duration start = Now();
      giver->Call(std::move(request), [&given](absl::Status status, absl::Duration) { given.End(status); });
      {
        MutexLock lock(&mutex);
        while (holder == nullptr) {
          if (!changed.WaitFor(&mutex, absl::Seconds(30))) break;
        }
        if (holder == nullptr) error = absl::DeadlineExceededError("the task was not given to another worker");
      }
      if (i >= kWarmUp) latencies.Add(Now() - start);
      if (absl::Status status = given.Wait(); !status.ok()) error = status;
      calls.Begin();
      wait(giver);
    }
    {
      MutexLock lock(&mutex);
      stop = true;
    }
    for (auto& worker : workers_) worker->Cancel();
    calls.Wait().IgnoreError();
    QUERN_RETURN_IF_ERROR(error);
    const absl::Duration bar = synced ? TellSyncs(*probe) : absl::Milliseconds(10);
    const absl::Duration p99 = latencies.Percentile(99);
    Tell("ready until its grant reaches a waiting call: p50, longest",
         absl::StrCat(Milliseconds(latencies.Percentile(50)), ", ", Milliseconds(latencies.Percentile(100))));
    Judge("ready until its grant reaches a waiting call: p99", Milliseconds(p99),
          synced ? absl::StrCat("under 3 x fdatasync p99 = ", Milliseconds(bar)) : "under 10 ms", p99 < bar);
    return absl::OkStatus();
  }

  absl::Status Restart(const std::string& big) {
    printf("kill -9\n");
    QUERN_RETURN_IF_ERROR(Stop());
    const absl::Duration begun = Now();
    QUERN_RETURN_IF_ERROR(Start({"--state-dir", JoinPath(flags_.directory, "state")}));
    const absl::Duration answered = Now() - begun;
    Judge("start to first answer", Milliseconds(answered), "under 2 s", answered < absl::Seconds(2));
    Outstanding calls;
    for (auto& worker : workers_) {
      calls.Begin();
      worker->Call(worker->Request(1, false), [&calls](absl::Status status, absl::Duration) { calls.End(status); });
    }
    QUERN_RETURN_IF_ERROR(calls.Wait());
    Tell("start until all workers are connected again and renewed", Milliseconds(Now() - begun));
    uint32_t tasks = 0;
    return Get(big, &tasks);
  }

  const Flags flags_;
  const std::string address_;
  std::unique_ptr<Subprocess> quernd_;
  std::unique_ptr<quern::v1::Jobs::Stub> jobs_;
  std::vector<std::unique_ptr<SimulatedWorker>> workers_;
  std::set<SimulatedWorker*> granted_;
};

int Main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);  // also into a file: it is watched
  Flags flags;
  CLI::App app("The coordinator under load");
  app.add_option("--quernd", flags.quernd)->required();
  app.add_option("--dir", flags.directory, "For the coordinator's state; on the disk that is to be measured");
  app.add_option("--shards", flags.shards, "For what the workers write (default: below /dev/shm, else with the state)");
  app.add_option("--phases", flags.phases)
      ->check(CLI::IsMember({"renewals", "commits", "throughput", "restart", "ready"}))
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--workers", flags.workers);
  app.add_option("--tasks", flags.tasks);
  app.add_option("--seconds", flags.seconds);
  app.add_option("--commits-per-second", flags.commits_per_second);
  CLI11_PARSE(app, argc, argv);
  // Each worker is a connection, here and there.
  const rlimit files = {static_cast<rlim_t>(flags.workers + 2000), static_cast<rlim_t>(flags.workers + 2000)};
  rlimit now = {};
  if (getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur < files.rlim_cur && setrlimit(RLIMIT_NOFILE, &files) != 0)
    perror("RLIMIT_NOFILE");
  // As in quernd: what Debian's Abseil does for each lock of gRPC's is not what is to be measured.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  absl::StatusOr<TempDir> made = TempDir::Make("quern-load");
  if (!made.ok()) {
    fprintf(stderr, "load_bench: %s\n", made.status().ToString().c_str());
    return 1;
  }
  if (flags.directory.empty()) flags.directory = made->path();
  char in_memory[] = "/dev/shm/quern-load.XXXXXX";
  const bool has_memory = mkdtemp(in_memory) != nullptr;
  if (flags.shards.empty()) flags.shards = has_memory ? in_memory : flags.directory;
  absl::Status status = Bench(flags).Run();
  if (has_memory) status.Update(RemoveTree(in_memory));
  if (!status.ok()) fprintf(stderr, "load_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) { return quern::Main(argc, argv); }
