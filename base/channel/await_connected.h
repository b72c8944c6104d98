// Waiting for a connection that was lost.
#ifndef QUERN_BASE_CHANNEL_AWAIT_CONNECTED_H_
#define QUERN_BASE_CHANNEL_AWAIT_CONNECTED_H_

#include <functional>

#include "absl/time/time.h"
#include "grpcpp/channel.h"

namespace quern {

// For GRPC_ARG_MIN_RECONNECT_BACKOFF_MS: how long an attempt to connect may take. A machine that lost its power in the midst of one never
// answers.
inline constexpr int kConnectMs = 5'000;

// A channel that has lost its connection fails calls at once, and makes another connection only while somebody polls it: calls that are
// tried again after pauses may never see a handshake through. This polls: it blocks until `channel` is connected, `patience` is over or
// `wanted`, which is asked every 50 ms, says no.
void AwaitConnected(grpc::Channel& channel, absl::Duration patience, const std::function<bool()>& wanted);

}  // namespace quern

#endif  // QUERN_BASE_CHANNEL_AWAIT_CONNECTED_H_
