// The data plane: tickets by gRPC, bytes over data connections. The only room of the worker beside its supervisor that knows gRPC.
#ifndef QUERN_WORKER_TRANSFER_LINK_DATA_PLANE_H_
#define QUERN_WORKER_TRANSFER_LINK_DATA_PLANE_H_

#include <memory>
#include <string>

#include "base/channel/credentials.h"
#include "worker/pipeline/data_plane.h"

namespace quern::worker {

// `server` is "unix:/path" or "host:port". Each attempt has a connection for its source and one for its shard, so that neither waits for
// the other. `security` was checked.
std::unique_ptr<DataPlane> NewLinkDataPlane(const std::string& server, const ChannelSecurity& security = {});

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_LINK_DATA_PLANE_H_
