#include "client/private_farm.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/channel/deadline.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "client/connection.h"

namespace quern::client {
namespace {

constexpr char kCoordinator[] = "quernd";
constexpr char kWorker[] = "quern-worker";
constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr absl::Duration kStopTimeout = absl::Seconds(20);
constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr int kMaxDeaths = 6;
constexpr int kUsageStatus = 2;  // of quern-worker
constexpr size_t kTailLines = 8;
constexpr uint64_t kTailBytes = 64 * 1024;

absl::StatusOr<std::string> ProgramOr(const std::string& path, const char* name) {
  return path.empty() ? FindProgram(name) : absl::StatusOr<std::string>(path);
}

void Pause() { std::this_thread::sleep_for(absl::ToChronoMilliseconds(kPoll)); }

}  // namespace

absl::StatusOr<std::string> FindProgram(const std::string& name) {
  const std::string beside = ProgramDirectory();
  std::vector<std::string> candidates = {JoinPath(beside, name), JoinPath(beside, absl::StrCat("../daemon/", name)),
                                         JoinPath(beside, absl::StrCat("../worker/", name))};
  if (const char* path = getenv("PATH")) {
    for (absl::string_view directory : absl::StrSplit(path, ':', absl::SkipEmpty())) candidates.push_back(JoinPath(directory, name));
  }
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return absl::NotFoundError(absl::StrCat("the program ", name, " is neither in ", beside, " nor on PATH; install it beside quern"));
}

std::string PrivateFarm::Address() const { return absl::StrCat("unix:", JoinPath(runtime_.path(), "quern.sock")); }

std::string PrivateFarm::LogPath(const std::string& program) const { return JoinPath(runtime_.path(), absl::StrCat(program, ".log")); }

std::string PrivateFarm::LogTail(const std::string& program) const {
  const absl::StatusOr<UniqueFd> fd = OpenFile(LogPath(program), O_RDONLY);
  const absl::StatusOr<uint64_t> size = FileSize(LogPath(program));
  if (!fd.ok() || !size.ok()) return "";
  std::string text(std::min(*size, kTailBytes), '\0');
  if (!ReadExactly(fd->get(), *size - text.size(), text.data(), text.size(), program).ok()) return "";
  std::vector<std::string> lines = absl::StrSplit(absl::StripAsciiWhitespace(text), '\n');
  if (lines.size() > kTailLines) lines.erase(lines.begin(), lines.end() - kTailLines);
  if (lines.size() == 1 && lines[0].empty()) return "";
  return absl::StrCat("\n  last words of ", program, ":\n    ", absl::StrJoin(lines, "\n    "));
}

absl::Status PrivateFarm::CoordinatorGone(const ExitState& state) const {
  return absl::UnavailableError(absl::StrCat("the coordinator ended unexpectedly (", state.ToString(), ")", LogTail(kCoordinator)));
}

absl::Status PrivateFarm::StartCoordinator() {
  QUERN_ASSIGN_OR_RETURN(const std::string program, ProgramOr(options_.coordinator_program, kCoordinator));
  Subprocess::Options child;
  child.argv = {program, "--private", "--listen", Address()};
  if (options_.state_directory.empty()) {
    child.argv.push_back("--in-memory");
  } else {
    child.argv.insert(child.argv.end(), {"--state-dir", options_.state_directory});
  }
  child.log_path = LogPath(kCoordinator);
  QUERN_ASSIGN_OR_RETURN(coordinator_, Subprocess::Spawn(child));
  return absl::OkStatus();
}

absl::Status PrivateFarm::StartWorker() {
  QUERN_ASSIGN_OR_RETURN(const std::string program, ProgramOr(options_.worker_program, kWorker));
  const uint32_t threads = options_.threads > 0 ? options_.threads : std::max(1u, std::thread::hardware_concurrency());
  Subprocess::Options child;
  child.argv = {program, "--server", Address(), "--memory", absl::StrCat(options_.memory), "--threads", absl::StrCat(threads), "--name",
                "local", "--device", "cpu",
                // Those of the environment are for other coordinators.
                "--token-file", ""};
  if (!options_.reader.empty()) child.argv.insert(child.argv.end(), {"--reader", options_.reader});
  child.log_path = LogPath(kWorker);
  QUERN_ASSIGN_OR_RETURN(worker_, Subprocess::Spawn(child));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PrivateFarm>> PrivateFarm::Start(const Options& options, Interrupt& interrupt, Clock* clock) {
  QUERN_ASSIGN_OR_RETURN(RuntimeDirectory runtime, RuntimeDirectory::Make(RuntimeBase()));
  std::unique_ptr<PrivateFarm> farm(new PrivateFarm(options, std::move(runtime), clock));
  QUERN_RETURN_IF_ERROR(farm->StartCoordinator());
  const std::shared_ptr<grpc::Channel> channel = MakeChannel(farm->Address());
  const absl::Duration deadline = clock->Monotonic() + kStartTimeout;
  while (!channel->WaitForConnected(DeadlineIn(kPoll))) {
    ExitState state;
    QUERN_ASSIGN_OR_RETURN(const bool ended, farm->coordinator_->Poll(&state));
    if (ended)
      return absl::UnavailableError(absl::StrCat("the coordinator did not start (", state.ToString(), ")", farm->LogTail(kCoordinator)));
    if (interrupt.requested()) return absl::CancelledError("interrupted");
    if (clock->Monotonic() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("the coordinator did not answer within ", absl::FormatDuration(kStartTimeout), farm->LogTail(kCoordinator)));
    }
  }
  farm->jobs_ = quern::v1::Jobs::NewStub(channel);
  if (options.worker) QUERN_RETURN_IF_ERROR(farm->StartWorker());
  return farm;
}

absl::Status PrivateFarm::Check(uint32_t tasks_done, std::string* restarted) {
  ExitState state;
  QUERN_ASSIGN_OR_RETURN(const bool coordinator_ended, coordinator_->Poll(&state));
  if (coordinator_ended) return CoordinatorGone(state);
  if (!options_.worker || draining_) return absl::OkStatus();

  if (tasks_done > tasks_done_) deaths_ = 0;
  tasks_done_ = tasks_done;
  const absl::Duration now = clock_->Monotonic();
  if (worker_) {
    QUERN_ASSIGN_OR_RETURN(const bool ended, worker_->Poll(&last_death_));
    if (!ended) return absl::OkStatus();
    worker_.reset();
    ++deaths_;
    // A worker that does not like its flags will not like them the next time.
    if (!last_death_.signaled && last_death_.code == kUsageStatus) {
      return absl::InternalError(absl::StrCat("the worker does not start (", last_death_.ToString(), ")", LogTail(kWorker)));
    }
    if (deaths_ >= kMaxDeaths) {
      return absl::UnavailableError(
          absl::StrCat("the worker died ", deaths_, " times without finishing a task (", last_death_.ToString(), ")", LogTail(kWorker)));
    }
    restart_at_ = now + absl::Milliseconds(100) * (1 << deaths_);
  }
  if (now < restart_at_) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(StartWorker());
  *restarted = absl::StrCat("the worker ended (", last_death_.ToString(), ") and was started again");
  return absl::OkStatus();
}

absl::Status PrivateFarm::ExplainLostConnection(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kUnavailable || !coordinator_ || !coordinator_->running()) return status;
  const absl::Duration deadline = clock_->Monotonic() + absl::Seconds(1);
  do {
    ExitState state;
    QUERN_ASSIGN_OR_RETURN(const bool ended, coordinator_->Poll(&state));
    if (ended) return CoordinatorGone(state);
    Pause();
  } while (clock_->Monotonic() < deadline);
  return status;
}

absl::Status PrivateFarm::DrainWorker() {
  draining_ = true;
  return worker_ ? worker_->Kill(SIGTERM) : absl::OkStatus();
}

bool PrivateFarm::worker_running() {
  if (!worker_ || !worker_->running()) return false;
  const absl::StatusOr<bool> ended = worker_->Poll(&last_death_);
  return ended.ok() && !*ended;
}

absl::Status PrivateFarm::StopChild(std::optional<Subprocess>& child) {
  if (!child || !child->running()) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(child->Kill(SIGTERM));
  const absl::Duration deadline = Clock::Real()->Monotonic() + kStopTimeout;
  ExitState state;
  while (true) {
    QUERN_ASSIGN_OR_RETURN(const bool ended, child->Poll(&state));
    if (ended) return absl::OkStatus();
    if (Clock::Real()->Monotonic() > deadline) break;
    Pause();
  }
  return KillChild(*child);
}

absl::Status PrivateFarm::KillChild(Subprocess& child) {
  QUERN_RETURN_IF_ERROR(child.Kill(SIGKILL));
  return child.Wait().status();
}

absl::Status PrivateFarm::Stop() {
  draining_ = true;
  // Without a coordinator nobody takes what the worker would finish first.
  const bool coordinator_gone = !coordinator_ || !coordinator_->running();
  if (coordinator_gone && worker_) QUERN_RETURN_IF_ERROR(worker_->Kill(SIGKILL));
  const absl::Status worker = StopChild(worker_);
  // The server's shutdown waits for an open channel to answer, and nobody polls ours any more.
  jobs_.reset();
  // One that keeps its state in memory has nothing to put away, and a plan of many tensors takes a while to take apart.
  const bool nothing_to_keep = options_.state_directory.empty() && coordinator_ && coordinator_->running();
  const absl::Status coordinator = nothing_to_keep ? KillChild(*coordinator_) : StopChild(coordinator_);
  return worker.ok() ? coordinator : worker;
}

}  // namespace quern::client
