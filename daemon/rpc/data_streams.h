// The streams of the data plane. They delete themselves.
#ifndef QUERN_DAEMON_RPC_DATA_STREAMS_H_
#define QUERN_DAEMON_RPC_DATA_STREAMS_H_

#include "daemon/rpc/data_service.h"

namespace quern::daemon {

grpc::ServerBidiReactor<quern::v1::ReadSourceRequest, quern::v1::ReadSourceResponse>* NewReadSourceStream(
    DataService* service, grpc::CallbackServerContext* context);
grpc::ServerBidiReactor<quern::v1::WriteShardRequest, quern::v1::WriteShardResponse>* NewWriteShardStream(
    DataService* service, grpc::CallbackServerContext* context);
grpc::ServerWriteReactor<quern::v1::ReadResultResponse>* NewReadResultStream(DataService* service, grpc::CallbackServerContext* context,
                                                                             const quern::v1::ReadResultRequest& request);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_DATA_STREAMS_H_
