#include "worker/transfer/link_status.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "quern/v1/jobs.pb.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // The codes are the same numbers.
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  quern::v1::ErrorStatus details;
  quern::v1::ErrorInfo info;
  if (!details.ParseFromString(status.error_details()) || details.details_size() == 0 ||
      !info.ParseFromString(details.details(0).value())) {
    return result;
  }
  if (info.reason() == "SOURCE_CHANGED") return WithFailure(std::move(result), quern::v1::SOURCE_CHANGED);
  if (info.reason() == "FENCED") return WithFailure(std::move(result), quern::v1::LINK_LOST);
  return result;
}

absl::Status FromErrorStatus(const std::string& serialized) {
  if (serialized.empty()) return absl::OkStatus();
  quern::v1::ErrorStatus error;
  if (!error.ParseFromString(serialized)) return absl::UnavailableError("the coordinator's last word is garbled");
  return FromGrpc(grpc::Status(static_cast<grpc::StatusCode>(error.code()), error.message(), serialized));
}

bool IsPassing(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:
    // Frames cut short.
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
      return true;
    // Limits of a busy coordinator, but not its disk.
    case absl::StatusCode::kResourceExhausted:
      return !absl::StrContains(status.message(), "disk full");
    default:
      return false;
  }
}

absl::Status LinkLost(absl::Duration tried, const absl::Status& last) {
  return WithFailure(
      absl::UnavailableError(absl::StrCat("nothing has come through to or from the coordinator for ",
                                          absl::FormatDuration(absl::Trunc(tried, absl::Milliseconds(1))), ": ", last.message())),
      quern::v1::LINK_LOST);
}

}  // namespace quern::worker
