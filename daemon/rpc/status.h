// Errors with a machine-readable reason, and their form in gRPC.
#ifndef QUERN_DAEMON_RPC_STATUS_H_
#define QUERN_DAEMON_RPC_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/status.h"

namespace quern::daemon {

// Reasons are those of JobError, in capitals.
absl::Status WithReason(absl::Status status, absl::string_view reason);
// Empty when there is none.
std::string ReasonOf(const absl::Status& status);

// The same code and message, the reason as a google.rpc.ErrorInfo in the details: a serialized quern.v1.ErrorStatus, empty for OK.
std::string ToErrorStatus(const absl::Status& status);
// Likewise, with those details.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_STATUS_H_
