#include "channel/await_connected.h"

#include <chrono>

#include "base/clock.h"

namespace quern {
namespace {

constexpr std::chrono::milliseconds kStep{50};

}  // namespace

void AwaitConnected(grpc::Channel& channel, absl::Duration patience, const std::function<bool()>& wanted) {
  const absl::Duration until = Clock::Real()->Monotonic() + patience;
  while (wanted() && Clock::Real()->Monotonic() < until) {
    if (channel.WaitForConnected(std::chrono::system_clock::now() + kStep)) return;
  }
}

}  // namespace quern
