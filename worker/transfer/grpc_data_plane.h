// The data plane over gRPC: the only room of the worker beside its supervisor that knows it.
#ifndef QUERN_WORKER_TRANSFER_GRPC_DATA_PLANE_H_
#define QUERN_WORKER_TRANSFER_GRPC_DATA_PLANE_H_

#include <memory>
#include <string>

#include "base/channel/credentials.h"
#include "worker/pipeline/data_plane.h"

namespace quern::worker {

// `server` is "unix:/path" or "host:port". Sources and shards have a connection each, so that neither waits for the other.
// `security` was checked.
std::unique_ptr<DataPlane> NewGrpcDataPlane(const std::string& server, const ChannelSecurity& security = {});

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_GRPC_DATA_PLANE_H_
