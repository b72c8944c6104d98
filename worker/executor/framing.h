// Messages over the channel between a supervisor and its executor: a little-endian u32 with the size, then the protobuf message. See
// proto/quern/v1/executor.proto.
#ifndef QUERN_WORKER_EXECUTOR_FRAMING_H_
#define QUERN_WORKER_EXECUTOR_FRAMING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message_lite.h"

namespace quern::worker {

// Bound of one message: a task of 8,192 tensors takes a few MiB.
inline constexpr uint32_t kMaxFrameSize = uint32_t{64} << 20;

// Blocks until the socket has taken all of it. A peer that is gone is UNAVAILABLE, a peer that did not read within the socket's send
// timeout DEADLINE_EXCEEDED, a message above the bound RESOURCE_EXHAUSTED (nothing is sent then). Concurrent writers need a lock.
absl::Status WriteFrame(int socket, const google::protobuf::MessageLite& message);

// Blocks for one message. False: the peer closed the channel between two messages. An end inside a message, a size above the bound and
// bytes that are no such message are DATA_LOSS. Memory grows with the bytes that arrived, not with the size announced.
absl::StatusOr<bool> ReadFrame(int socket, google::protobuf::MessageLite* message);

}  // namespace quern::worker

#endif  // QUERN_WORKER_EXECUTOR_FRAMING_H_
