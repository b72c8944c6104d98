#include "daemon/rpc/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "quern/v1/jobs.pb.h"

namespace quern::daemon {
namespace {
constexpr char kReasonUrl[] = "quern/reason";

// A status travels in HTTP/2 trailers, which Quern's clients accept up to 1 MiB, percent-encoded. Lists of problems can be longer.
constexpr size_t kLongestMessage = 128 << 10;

std::string Shortened(absl::string_view message) {
  if (message.size() <= kLongestMessage) return std::string(message);
  const size_t line_end = message.rfind('\n', kLongestMessage);
  const absl::string_view kept = message.substr(0, line_end == absl::string_view::npos ? kLongestMessage : line_end);
  return absl::StrCat(kept, "\n... and ", message.size() - kept.size(), " more bytes of messages");
}
}  // namespace

absl::Status WithReason(absl::Status status, absl::string_view reason) {
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : "";
}

std::string ToErrorStatus(const absl::Status& status) {
  if (status.ok()) return "";
  quern::v1::ErrorStatus error;
  error.set_code(status.raw_code());
  error.set_message(Shortened(status.message()));
  if (const std::string reason = ReasonOf(status); !reason.empty()) {
    quern::v1::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain("quern");
    google::protobuf::Any& any = *error.add_details();
    any.set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
    any.set_value(info.SerializeAsString());
  }
  return error.SerializeAsString();
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // The codes of absl and gRPC are the same numbers.
  const auto code = static_cast<grpc::StatusCode>(status.raw_code());
  const std::string message = Shortened(status.message());
  // Trailers are short: without a reason the details would say everything once more.
  return ReasonOf(status).empty() ? grpc::Status(code, message) : grpc::Status(code, message, ToErrorStatus(status));
}

}  // namespace quern::daemon
