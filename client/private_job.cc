#include "client/private_job.h"

#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text_check.h"
#include "client/connection.h"
#include "client/interrupt.h"
#include "client/job_report.h"
#include "client/manifest_summary.h"
#include "client/output_state.h"
#include "client/progress.h"

namespace quern::client {
namespace {

using quern::v1::Job;
using quern::v1::JobSpec;

constexpr absl::Duration kOldCoordinatorTimeout = absl::Minutes(1);
constexpr char kGoOn[] = "run the same command again to continue";
constexpr char kNothingKept[] = "not everything was checked, and what was is not kept: the next run begins anew";

absl::StatusOr<Job> CreateJob(PrivateFarm& farm, const JobSpec& spec, Interrupt& interrupt) {
  quern::v1::CreateJobRequest request;
  request.set_request_id(RandomUuid());
  *request.mutable_spec() = spec;
  Job job;
  const absl::Status status =
      CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return farm.jobs().CreateJob(context, request, &job); });
  if (!status.ok()) return farm.ExplainLostConnection(status);
  return job;
}

// A killed command's coordinator may have to finish what it is publishing before it ends.
absl::Status AwaitOldCoordinator(const OutputState& state, Interrupt& interrupt, Console& console) {
  const absl::Duration deadline = console.clock->Monotonic() + kOldCoordinatorTimeout;
  while (state.HeldByOldCoordinator()) {
    if (interrupt.requested()) return absl::CancelledError("interrupted");
    if (console.clock->Monotonic() > deadline) {
      return absl::UnavailableError(absl::StrCat("the coordinator of an earlier run still has ", state.directory(),
                                                 " open; wait until it has ended, or end it (pgrep quernd)"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return absl::OkStatus();
}

// The plan was never made: nothing of the job is worth keeping.
bool NeverPlanned(const Job& job) { return job.state() == Job::FAILED && job.progress().tasks_total() == 0; }

}  // namespace

absl::StatusOr<WatchOutcome> RunPrivateJob(const JobSpec& spec, const WorkerOptions& worker, bool durable, Console& console) {
  Interrupt interrupt;
  PrivateFarm::Options options;
  QUERN_ASSIGN_OR_RETURN(options.memory, worker.MemoryBytes());
  options.threads = worker.threads;
  options.reader = worker.reader;

  std::optional<OutputState> state;
  if (durable) {
    QUERN_ASSIGN_OR_RETURN(state, OutputState::Prepare(spec.output()));
    options.state_directory = state->directory();
    QUERN_RETURN_IF_ERROR(AwaitOldCoordinator(*state, interrupt, console));
  }
  // Undoing must not hide the reason for it.
  const auto undo = [&](const absl::Status& reason) {
    const absl::Status undone = state ? state->Undo() : absl::OkStatus();
    if (undone.ok()) return reason;
    return Annotate(reason, absl::StrCat("(also, ", undone.message(), ")"));
  };

  absl::StatusOr<std::unique_ptr<PrivateFarm>> started = PrivateFarm::Start(options, interrupt, console.clock);
  if (!started.ok()) return undo(started.status());
  PrivateFarm& farm = **started;
  const absl::StatusOr<Job> job = CreateJob(farm, spec, interrupt);
  if (!job.ok()) {
    const absl::Status stopped = farm.Stop();
    if (!stopped.ok()) console.err << "warning: " << stopped.message() << "\n";
    if (interrupt.requested() && durable) return absl::CancelledError(absl::StrCat("interrupted while the job was planned; ", kGoOn));
    return undo(job.status());
  }

  Progress progress(&console.err, console.clock, {.terminal = console.err_is_terminal, .width = console.err_width});
  absl::StatusOr<WatchOutcome> outcome = WatchJob(farm.jobs(), *job, &farm, interrupt, progress, console.clock);
  if (outcome.ok() && HasEnded(outcome->job)) {
    // The stream leaves out the plan.
    quern::v1::GetJobRequest request;
    request.set_name(job->name());
    Job whole;
    const absl::Status got =
        CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return farm.jobs().GetJob(context, request, &whole); });
    if (got.ok()) {
      outcome->job = std::move(whole);
      // Only the answer to CreateJob knows it.
      outcome->job.set_already_done(job->already_done());
    }
  }
  progress.Clear();
  const absl::Status stopped = farm.Stop();
  if (!outcome.ok()) return durable ? Annotate(outcome.status(), absl::StrCat("the job stopped; ", kGoOn)) : outcome.status();
  if (outcome->interrupted) console.err << "stopped; " << (durable ? kGoOn : kNothingKept) << "\n";
  QUERN_RETURN_IF_ERROR(stopped);
  if (state) {
    if (outcome->job.state() == Job::SUCCEEDED) QUERN_RETURN_IF_ERROR(state->RemoveState());
    if (NeverPlanned(outcome->job)) QUERN_RETURN_IF_ERROR(state->Undo());
  }
  return outcome;
}

absl::StatusOr<ExitCode> RunToOutput(const quern::v1::JobSpec& spec, const WorkerOptions& worker, size_t worst_modules, bool json,
                                     Console& console) {
  QUERN_ASSIGN_OR_RETURN(const WatchOutcome outcome, RunPrivateJob(spec, worker, /*durable=*/true, console));
  const ExitCode code = outcome.interrupted ? ExitCode::kFailed : ExitCodeOf(outcome.job);
  ReportOutcome(outcome, json, console);
  if (code == ExitCode::kDone && !json) {
    QUERN_ASSIGN_OR_RETURN(const ManifestSummary summary, ReadManifestSummary(spec.output(), worst_modules));
    console.out << "\n" << PlainLines(FormatManifestSummary(summary));
  }
  return code;
}

absl::Status AskPrivateCoordinator(Console& console,
                                   const std::function<grpc::Status(quern::v1::Jobs::Stub&, grpc::ClientContext*)>& question) {
  Interrupt interrupt;
  PrivateFarm::Options options;
  options.worker = false;
  QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<PrivateFarm> farm, PrivateFarm::Start(options, interrupt, console.clock));
  const absl::Status status = CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return question(farm->jobs(), context); });
  const absl::Status explained = farm->ExplainLostConnection(status);
  const absl::Status stopped = farm->Stop();
  return explained.ok() ? stopped : explained;
}

}  // namespace quern::client
