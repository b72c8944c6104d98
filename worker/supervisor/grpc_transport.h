// Calls over one gRPC channel. The only file of the worker, beside the program, that knows gRPC.
#ifndef QUERN_WORKER_SUPERVISOR_GRPC_TRANSPORT_H_
#define QUERN_WORKER_SUPERVISOR_GRPC_TRANSPORT_H_

#include <memory>
#include <string>

#include "base/channel/credentials.h"
#include "worker/supervisor/sync_transport.h"

namespace quern::worker {

// `server` is "unix:/path" or "host:port"; nothing is connected before the first call. One thread and one connection, re-made with a delay
// of at most a second after it was lost. `security` was checked.
std::unique_ptr<SyncTransport> NewGrpcTransport(const std::string& server, const ChannelSecurity& security = {});

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_GRPC_TRANSPORT_H_
