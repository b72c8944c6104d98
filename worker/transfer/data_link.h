// The way to the data plane of the coordinator.
#ifndef QUERN_WORKER_TRANSFER_DATA_LINK_H_
#define QUERN_WORKER_TRANSFER_DATA_LINK_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>
#include <utility>

#include "base/link/dial.h"
#include "quern/v1/data.grpc.pb.h"

namespace quern::worker {

// Thread-safe; shared by those that carry something over it.
struct DataLink {
  DataLink(std::shared_ptr<grpc::Channel> to, const std::string& server, const TlsFiles& tls)
      : channel(std::move(to)), stub(quern::v1::Data::NewStub(channel)), dialer(server, tls) {}

  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<quern::v1::Data::StubInterface> stub;  // over the channel
  LinkDialer dialer;                                           // to the same coordinator
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_DATA_LINK_H_
