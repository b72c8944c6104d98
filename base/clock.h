// The two clocks, injected so that tests decide what time it is. Leases use the monotonic one: a wall clock can jump.
#ifndef QUERN_BASE_CLOCK_H_
#define QUERN_BASE_CLOCK_H_

#include "absl/time/time.h"
#include "base/mutex.h"

namespace quern {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Time of day, for people and records.
  virtual absl::Time Wall() const = 0;
  // Time since an arbitrary start that never goes back, for leases and timeouts.
  virtual absl::Duration Monotonic() const = 0;

  // The machine's clocks; never destroyed.
  static Clock* Real();
};

// A clock that moves only when told to.
class ManualClock : public Clock {
 public:
  absl::Time Wall() const override;
  absl::Duration Monotonic() const override;
  void Advance(absl::Duration by);
  // Moves the wall clock alone, as an administrator or NTP does.
  void JumpWall(absl::Duration by);

 private:
  mutable Mutex mutex_;
  absl::Time wall_ QUERN_GUARDED_BY(mutex_) = absl::FromUnixSeconds(1'700'000'000);
  absl::Duration monotonic_ QUERN_GUARDED_BY(mutex_) = absl::Seconds(1000);
};

}  // namespace quern

#endif  // QUERN_BASE_CLOCK_H_
