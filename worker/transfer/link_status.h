// What the end of a call of the data plane means to an attempt.
#ifndef QUERN_WORKER_TRANSFER_LINK_STATUS_H_
#define QUERN_WORKER_TRANSFER_LINK_STATUS_H_

#include <grpcpp/grpcpp.h>

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace quern::worker {

// Code and message, with the failure that the coordinator's reason stands for. An attempt that is fenced fails with LINK_LOST: nobody wants
// it any more, and nobody is to blame.
absl::Status FromGrpc(const grpc::Status& status);
// Likewise, of a serialized quern.v1.ErrorStatus, with which a data connection ends; empty: OK.
absl::Status FromErrorStatus(const std::string& serialized);

// Whether the same call may succeed a little later: connections that broke, coordinators that are away.
bool IsPassing(const absl::Status& status);

// The link was tried for `tried` without a byte moved.
absl::Status LinkLost(absl::Duration tried, const absl::Status& last);

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_LINK_STATUS_H_
