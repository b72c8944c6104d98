#include "client/job_report.h"

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/byte_size.h"
#include "base/task_memory.h"
#include "base/text_check.h"
#include "client/exit_code.h"
#include "client/human.h"
#include "client/json_output.h"
#include "client/progress.h"
#include "client/tables.h"

namespace quern::client {
namespace {

using quern::v1::Job;
using quern::v1::JobSpec;

// A damaged output can have as many mismatches as tensors.
constexpr int kMismatchesShown = 50;

absl::Time ToTime(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

std::string FormatTime(const google::protobuf::Timestamp& time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", ToTime(time), absl::LocalTimeZone());
}

// What workers, other clients and files say, in full and as one line: none of it is to write lines of its own, or to control the terminal.
std::string Line(const std::string& text) { return OneLine(text, text.size()); }

// Messages may have several lines; all but the first are set in.
std::string FormatError(const quern::v1::JobError& error) {
  return absl::StrCat(Line(error.reason()), error.task().empty() ? "" : absl::StrCat(" in ", Line(error.task())), ": ",
                      absl::StrReplaceAll(PlainLines(error.message()), {{"\n", "\n    "}}));
}

std::string FormatMismatches(const Job& job) {
  std::string text;
  for (int i = 0; i < job.mismatches_size() && i < kMismatchesShown; ++i) {
    const auto& mismatch = job.mismatches(i);
    std::vector<std::string> where;
    for (const std::string* part : {&mismatch.file(), &mismatch.tensor()}) {
      if (!part->empty()) where.push_back(Line(*part));
    }
    absl::StrAppend(&text, "  ", absl::StrJoin(where, ": "), mismatch.offset() > 0 ? absl::StrCat(" at byte ", mismatch.offset()) : "",
                    where.empty() ? "" : ": ", Line(mismatch.what()), "\n");
  }
  if (job.mismatches_size() > kMismatchesShown) {
    absl::StrAppend(&text, "  and ", FormatCount(job.mismatches_size() - kMismatchesShown), " more (--json lists all)\n");
  }
  return text;
}

template <typename State>
std::string Lower(const State& name) {
  return absl::AsciiStrToLower(name);
}

std::string DescribeRaw(const JobSpec& spec) {
  switch (spec.details_case()) {
    case JobSpec::kQuantize:
      return absl::StrCat("quantize ", spec.quantize().source(), " -> ", spec.output());
    case JobSpec::kDequantize:
      return absl::StrCat("dequantize ", spec.dequantize().source(), " -> ", spec.output());
    case JobSpec::kVerify:
      return absl::StrCat("verify ", spec.output(),
                          spec.verify().against().empty() ? "" : absl::StrCat(" against ", spec.verify().against()));
    case JobSpec::kSynthesize:
      return absl::StrCat("synthesize ", spec.synthesize().family(), " -> ", spec.output());
    case JobSpec::DETAILS_NOT_SET:
      break;
  }
  return spec.output();
}

}  // namespace

std::string Describe(const JobSpec& spec) { return Line(DescribeRaw(spec)); }

std::string FormatJobs(const quern::v1::ListJobsResponse& jobs, absl::Time now) {
  if (jobs.jobs_size() == 0) return "no jobs\n";
  Table table({{"JOB"}, {"STATE"}, {"TASKS", kRight}, {"AGE", kRight}, {"WHAT"}});
  for (const Job& job : jobs.jobs()) {
    table.AddRow({job.name(), StateName(job.state()), absl::StrCat(job.progress().tasks_done(), "/", job.progress().tasks_total()),
                  FormatElapsed(now - ToTime(job.create_time())), Describe(job.spec())});
  }
  return table.ToString();
}

std::string FormatTasks(const quern::v1::ListTasksResponse& tasks) {
  if (tasks.tasks_size() == 0) return "no tasks\n";
  Table table({{"TASK"}, {"STATE"}, {"WRITES"}, {"LAYERS"}, {"READ", kRight}, {"WRITTEN", kRight}, {"FAILURES", kRight}, {"WORKER"}});
  for (const auto& task : tasks.tasks()) {
    table.AddRow({task.name(), Lower(quern::v1::Task::State_Name(task.state())), task.label(),
                  FormatRanges({task.layers().begin(), task.layers().end()}), FormatByteSize(task.bytes_to_read()),
                  FormatByteSize(task.bytes_to_write()), absl::StrCat(task.failures()),
                  task.attempts_size() > 0 ? task.attempts(task.attempts_size() - 1).worker() : ""});
  }
  return table.ToString();
}

std::string FormatWaiting(const Job& job) {
  return job.waits_for().empty() ? "" : absl::StrCat("  waits for ", Line(job.waits_for()), "\n");
}

std::string FormatTask(const quern::v1::Task& task) {
  std::string text = absl::StrCat(task.name(), "  ", Lower(quern::v1::Task::State_Name(task.state())), "  ", Line(task.label()), "\n  ");
  if (task.layers_size() > 0) absl::StrAppend(&text, "layers ", FormatRanges({task.layers().begin(), task.layers().end()}), "; ");
  absl::StrAppend(&text, "reads ", FormatByteSize(task.bytes_to_read()), ", writes ", FormatByteSize(task.bytes_to_write()), ", needs ",
                  FormatLeastMemory(task.minimum_memory()), " of memory; ", task.failures(),
                  task.failures() == 1 ? " failure\n" : " failures\n");
  if (task.attempts_size() == 0) absl::StrAppend(&text, "no attempts\n");
  for (const quern::v1::Attempt& attempt : task.attempts()) {
    absl::StrAppend(&text, "\nattempt ", attempt.attempt(), "  ", Lower(quern::v1::Attempt::State_Name(attempt.state())), "  (",
                    Line(attempt.purpose()), ")\n  worker  ", Line(attempt.worker()), " on ", Line(attempt.host()),
                    attempt.device().empty() ? "" : absl::StrCat(", ", Line(attempt.device())), ", ", FormatByteSize(attempt.memory()),
                    "\n  granted ", FormatTime(attempt.grant_time()));
    if (attempt.has_end_time()) {
      absl::StrAppend(&text, ", ended ", FormatTime(attempt.end_time()), ", took ",
                      FormatElapsed(ToTime(attempt.end_time()) - ToTime(attempt.grant_time())));
    }
    absl::StrAppend(&text, "\n");
    if (!attempt.reason().empty()) absl::StrAppend(&text, "  reason  ", Line(attempt.reason()), "\n");
    if (!attempt.message().empty()) absl::StrAppend(&text, "  message ", Line(attempt.message()), "\n");
    const quern::v1::StageTimes& times = attempt.times();
    if (times.wall_seconds() > 0) {
      absl::StrAppendFormat(&text, "  stages  read %.2f s (stalled %.2f s), compute %.2f s (%.2f s), write %.2f s (%.2f s), hash %.2f s; ",
                            times.read_seconds(), times.read_stall_seconds(), times.compute_seconds(), times.compute_stall_seconds(),
                            times.write_seconds(), times.write_stall_seconds(), times.hash_seconds());
      absl::StrAppend(&text, "peak memory ", FormatByteSize(attempt.peak_rss()), "\n");
    }
  }
  return text;
}

std::string FormatJob(const Job& job, const quern::v1::ListTasksResponse& tasks) {
  std::string text =
      absl::StrCat(job.name(), "  ", StateName(job.state()), "\n  ", Describe(job.spec()), "\n  created ", FormatTime(job.create_time()));
  if (job.has_end_time()) absl::StrAppend(&text, ", ended ", FormatTime(job.end_time()));
  const auto& progress = job.progress();
  absl::StrAppend(&text, "\n  ", progress.tasks_done(), " of ", progress.tasks_total(), " tasks done, ", progress.tasks_running(),
                  " running, ", progress.tasks_failed(), " failed\n  ", FormatByteSize(progress.bytes_read()), " of ",
                  FormatByteSize(progress.bytes_to_read()), " read, ", FormatByteSize(progress.bytes_written()), " of ",
                  FormatByteSize(progress.bytes_to_write()), " written\n");
  if (progress.sum_squares() > 0) {
    absl::StrAppend(&text, "  SQNR ", FormatSqnr(progress.sum_squares(), progress.sum_squared_error()),
                    absl::StrFormat(", largest error %.3g", progress.max_abs_error()));
    if (!progress.worst_module().empty()) {
      absl::StrAppend(&text, "; worst module ", Line(progress.worst_module()), " (", FormatSqnr(1, progress.worst_relative_error()), ")");
    }
    absl::StrAppend(&text, "\n");
  }
  if (progress.tasks_to_audit() > 0) {
    absl::StrAppend(&text, "  ", progress.tasks_audited(), " of ", progress.tasks_to_audit(), " audits done\n");
  }
  if (job.priority() != 0) absl::StrAppend(&text, "  priority ", job.priority(), "\n");
  absl::StrAppend(&text, FormatWaiting(job));
  if (!job.error().message().empty()) absl::StrAppend(&text, "  error ", FormatError(job.error()), "\n");
  absl::StrAppend(&text, FormatMismatches(job));
  if (!job.plan().resolved_recipe().empty()) absl::StrAppend(&text, "\nrecipe\n", PlainLines(job.plan().resolved_recipe()));

  Table history({{"TASK"},
                 {"ATTEMPT", kRight},
                 {"WHY"},
                 {"STATE"},
                 {"WORKER"},
                 {"GRANTED"},
                 {"ENDED"},
                 {"TOOK", kRight},
                 {"MEMORY", kRight},
                 {"MESSAGE"}});
  for (const auto& task : tasks.tasks()) {
    for (const auto& attempt : task.attempts()) {
      const bool ended = attempt.has_end_time();
      history.AddRow(
          {task.name(), absl::StrCat(attempt.attempt()), attempt.purpose(), Lower(quern::v1::Attempt::State_Name(attempt.state())),
           attempt.worker(), FormatTime(attempt.grant_time()), ended ? FormatTime(attempt.end_time()) : "-",
           ended ? FormatElapsed(ToTime(attempt.end_time()) - ToTime(attempt.grant_time())) : "-", FormatByteSize(attempt.memory()),
           attempt.reason().empty() ? attempt.message() : absl::StrCat(attempt.reason(), ": ", attempt.message())});
    }
  }
  if (!history.empty()) absl::StrAppend(&text, "\n", history.ToString());
  return text;
}

std::string FormatWorkers(const quern::v1::ListWorkersResponse& workers, absl::Time now) {
  if (workers.workers_size() == 0) return "no workers\n";
  Table table({{"WORKER"},
               {"HOST"},
               {"STATE"},
               {"MEMORY", kRight},
               {"THREADS", kRight},
               {"DEVICES"},
               {"SEEN", kRight},
               {"VERSION"},
               {"TASKS"},
               {"DETAIL"}});
  for (const auto& worker : workers.workers()) {
    table.AddRow({worker.name(), worker.host(), worker.state(), FormatByteSize(worker.memory()), absl::StrCat(worker.threads()),
                  absl::StrJoin(worker.devices(), ", "), absl::StrCat(FormatElapsed(now - ToTime(worker.last_seen())), " ago"),
                  worker.version(), absl::StrJoin(worker.tasks(), ", "), worker.detail()});
  }
  return table.ToString();
}

std::string FormatOutcome(const WatchOutcome& outcome) {
  const Job& job = outcome.job;
  std::string text;
  if (job.mismatches_size() > 0 || job.error().reason() == "MISMATCH") {
    text = absl::StrCat("MISMATCH  ", Describe(job.spec()), "\n", FormatMismatches(job));
    if (job.mismatches_size() == 0) absl::StrAppend(&text, "  ", PlainLines(job.error().message()), "\n");
    return text;
  }
  if (job.state() == Job::FAILED) return absl::StrCat("failed  ", Describe(job.spec()), "\n  ", FormatError(job.error()), "\n");
  text = absl::StrCat(job.already_done() ? "already done" : StateName(job.state()), "  ", Describe(job.spec()), "\n");
  if (job.already_done()) return text;
  const auto& progress = job.progress();
  const uint64_t moved = progress.bytes_to_read() > 0 ? outcome.bytes_read : outcome.bytes_written;
  absl::StrAppend(&text, "  ", progress.tasks_done(), " of ", progress.tasks_total(), " tasks; ", FormatByteSize(progress.bytes_read()),
                  " read, ", FormatByteSize(progress.bytes_written()), " written; ", FormatElapsed(outcome.elapsed), " (",
                  FormatRate(moved, outcome.elapsed), ")\n");
  if (progress.sum_squares() > 0) {
    absl::StrAppend(&text, "  SQNR ", FormatSqnr(progress.sum_squares(), progress.sum_squared_error()),
                    absl::StrFormat(", largest error %.3g\n", progress.max_abs_error()));
  }
  return text;
}

void ReportOutcome(const WatchOutcome& outcome, bool json, Console& console) {
  // A finished verification has failed with MISMATCH, or has succeeded with mismatches.
  const bool failed = outcome.job.state() == Job::FAILED && ExitCodeOf(outcome.job) == ExitCode::kFailed;
  if (json) console.out << ToJson(outcome.job);
  if (outcome.interrupted) return;
  if (failed) {
    console.err << FormatOutcome(outcome);
  } else if (!json) {
    if (outcome.job.state() == Job::SUCCEEDED) {
      for (const std::string& warning : outcome.job.plan().warnings()) console.err << "warning: " << PlainLines(warning) << "\n";
    }
    console.out << FormatOutcome(outcome);
  }
}

}  // namespace quern::client
