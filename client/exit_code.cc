#include "client/exit_code.h"

#include "absl/strings/cord.h"

namespace quern::client {
namespace {

constexpr char kUsagePayload[] = "quern/usage";

}  // namespace

absl::Status UsageError(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsagePayload, absl::Cord());
  return status;
}

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return ExitCode::kDone;
  return status.GetPayload(kUsagePayload) ? ExitCode::kUsage : ExitCode::kFailed;
}

ExitCode ExitCodeOf(const quern::v1::Job& job) {
  if (job.mismatches_size() > 0 || job.error().reason() == "MISMATCH") return ExitCode::kMismatch;
  return job.state() == quern::v1::Job::SUCCEEDED ? ExitCode::kDone : ExitCode::kFailed;
}

}  // namespace quern::client
