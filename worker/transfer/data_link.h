// The way to the data plane of the coordinator.
#ifndef QUERN_WORKER_TRANSFER_DATA_LINK_H_
#define QUERN_WORKER_TRANSFER_DATA_LINK_H_

#include <memory>

#include "quern/v1/data.grpc.pb.h"

namespace quern::worker {

// Thread-safe; shared by those that carry something over it.
struct DataLink {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<quern::v1::Data::StubInterface> stub;  // over the channel
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_DATA_LINK_H_
