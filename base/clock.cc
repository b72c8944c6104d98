#include "base/clock.h"

#include <time.h>

#include "absl/time/clock.h"

namespace quern {
namespace {

class RealClock : public Clock {
 public:
  absl::Time Wall() const override { return absl::Now(); }
  absl::Duration Monotonic() const override {
    // CLOCK_BOOTTIME also counts suspended time: a lease must not outlive a laptop's sleep.
    timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return absl::DurationFromTimespec(now);
  }
};

}  // namespace

Clock* Clock::Real() {
  static RealClock* const clock = new RealClock;
  return clock;
}

absl::Time ManualClock::Wall() const {
  MutexLock lock(&mutex_);
  return wall_;
}

absl::Duration ManualClock::Monotonic() const {
  MutexLock lock(&mutex_);
  return monotonic_;
}

void ManualClock::Advance(absl::Duration by) {
  MutexLock lock(&mutex_);
  wall_ += by;
  monotonic_ += by;
}

void ManualClock::JumpWall(absl::Duration by) {
  MutexLock lock(&mutex_);
  wall_ += by;
}

}  // namespace quern
