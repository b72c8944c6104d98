// The way to the data plane of the coordinator.
#ifndef QUERN_WORKER_TRANSFER_DATA_STUB_H_
#define QUERN_WORKER_TRANSFER_DATA_STUB_H_

#include <memory>

#include "quern/v1/data.grpc.pb.h"

namespace quern::worker {

// Never null; thread-safe.
using DataStub = std::shared_ptr<quern::v1::Data::StubInterface>;

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_DATA_STUB_H_
