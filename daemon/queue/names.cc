#include "daemon/queue/names.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/worker_name.h"

namespace quern::daemon {

std::string JobName(uint64_t job) { return absl::StrCat("jobs/", job); }

std::string TaskName(uint64_t job, uint32_t task) { return absl::StrCat("jobs/", job, "/tasks/", task); }

std::string WorkerName(absl::string_view worker) { return absl::StrCat("workers/", worker); }

absl::StatusOr<uint64_t> ParseJobName(absl::string_view name) {
  absl::string_view digits = name;
  uint64_t job = 0;
  // SimpleAtoi alone would accept signs and spaces.
  if (!absl::ConsumePrefix(&digits, "jobs/") || !absl::SimpleAtoi(digits, &job) || JobName(job) != name) {
    return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is no job: a job is named jobs/NUMBER"));
  }
  return job;
}

absl::StatusOr<std::string> ParseWorkerName(absl::string_view name) {
  absl::string_view worker = name;
  if (!absl::ConsumePrefix(&worker, "workers/") || !CheckWorkerName(worker).ok()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is no worker: a worker is named workers/NAME"));
  }
  return std::string(worker);
}

}  // namespace quern::daemon
