#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

constexpr char kPayloadUrl[] = "type.googleapis.com/quern.v1.Failure";

quern::v1::FailureReason ReasonOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return absl::StrContains(status.message(), "disk full") ? quern::v1::DISK_FULL : quern::v1::OUT_OF_MEMORY;
    case absl::StatusCode::kInvalidArgument:
      return quern::v1::BAD_INPUT;
    case absl::StatusCode::kAlreadyExists:
      return quern::v1::OUTPUT_EXISTS;
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kFailedPrecondition:
      return quern::v1::IO_ERROR;
    case absl::StatusCode::kCancelled:
      return quern::v1::FAILURE_REASON_UNSPECIFIED;
    default:
      return quern::v1::INTERNAL;
  }
}

}  // namespace

quern::v1::Failure FailureOf(const absl::Status& status) {
  quern::v1::Failure failure;
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value() || !failure.ParseFromString(std::string(*payload))) failure.set_reason(ReasonOf(status));
  failure.set_message(std::string(status.message()));
  return failure;
}

absl::Status WithFailure(absl::Status status, quern::v1::FailureReason reason, uint64_t bytes_needed) {
  if (status.ok()) return status;
  quern::v1::Failure failure;
  failure.set_reason(reason);
  failure.set_bytes_needed(bytes_needed);
  status.SetPayload(kPayloadUrl, absl::Cord(failure.SerializeAsString()));
  return status;
}

}  // namespace quern::worker
