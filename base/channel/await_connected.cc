#include "base/channel/await_connected.h"

#include "base/channel/deadline.h"
#include "base/clock.h"

namespace quern {
namespace {

constexpr absl::Duration kStep = absl::Milliseconds(50);

}  // namespace

void AwaitConnected(grpc::Channel& channel, absl::Duration patience, const std::function<bool()>& wanted) {
  const absl::Duration until = Clock::Real()->Monotonic() + patience;
  while (wanted() && Clock::Real()->Monotonic() < until) {
    if (channel.WaitForConnected(DeadlineIn(kStep))) return;
  }
}

}  // namespace quern
