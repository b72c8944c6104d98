// Connections to a coordinator, and gRPC's errors as absl::Status.
#ifndef QUERN_CLIENT_CONNECTION_H_
#define QUERN_CLIENT_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/channel/credentials.h"
#include "client/interrupt.h"
#include "quern/v1/jobs.grpc.pb.h"

namespace quern::client {

inline constexpr char kDefaultServer[] = "unix:/run/quern/quern.sock";

// Code and message; the two enumerations agree in their numbers.
absl::Status FromGrpc(const grpc::Status& status);
// Likewise, of a serialized quern.v1.ErrorStatus, with which a data connection ends; empty: OK.
absl::Status FromErrorStatus(const std::string& serialized);

// A channel with Quern's limits (messages of up to 64 MiB, no HTTP proxy). Does not connect yet.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelSecurity& security = {});

// Blocks until the server answers. UNAVAILABLE says how to start one, or what its certificate may be lacking; files of `security` that
// cannot be used are a UsageError.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& address, const ChannelSecurity& security,
                                                              absl::Duration timeout);
absl::StatusOr<std::unique_ptr<quern::v1::Jobs::Stub>> ConnectToServer(const std::string& address, const ChannelSecurity& security,
                                                                       absl::Duration timeout);

// Runs a blocking call on another thread and gives it up, with CANCELLED, at the first interrupt.
absl::Status CallInterruptibly(Interrupt& interrupt, const std::function<grpc::Status(grpc::ClientContext*)>& call);

// "7", "jobs/7" -> "jobs/7"; a UsageError for anything else.
absl::StatusOr<std::string> JobName(const std::string& text);

// "node7", "workers/node7" -> "workers/node7"; a UsageError for what no worker can be named.
absl::StatusOr<std::string> WorkerName(const std::string& text);

// A random UUID, for request ids.
std::string RandomUuid();

}  // namespace quern::client

#endif  // QUERN_CLIENT_CONNECTION_H_
