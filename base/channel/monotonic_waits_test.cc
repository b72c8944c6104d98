// The program has the syscall() of monotonic_waits.cc; what that passes on comes to test_kernel.cc.
#include <errno.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/channel/test_kernel.h"

namespace quern {
namespace {

absl::Duration Monotonic() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::DurationFromTimespec(now);
}

TEST(MonotonicWaitsTest, AbseilWaitsByTheMonotonicClock) {
  absl::Mutex mutex;
  absl::CondVar never;
  const absl::Duration before = Monotonic();
  ClearFutexWaits();
  absl::MutexLock lock(&mutex);
  // Nobody signals: it ends by its time.
  EXPECT_TRUE(never.WaitWithDeadline(&mutex, absl::Now() + absl::Milliseconds(30)));
  const absl::Duration after = Monotonic();
  const std::vector<FutexWait> waits = FutexWaits();
  ASSERT_FALSE(waits.empty());
  for (const FutexWait& wait : waits) {
    EXPECT_EQ(wait.operation & FUTEX_CLOCK_REALTIME, 0);
    EXPECT_GT(absl::DurationFromTimespec(wait.until), before + absl::Milliseconds(20));
    EXPECT_LE(absl::DurationFromTimespec(wait.until), after);
  }
}

TEST(MonotonicWaitsTest, WaitForATimeLongPastEndsAtOnce) {
  uint32_t word = 0;
  const timespec until = {1, 0};
  EXPECT_EQ(
      syscall(SYS_futex, &word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME, 0, &until, nullptr, FUTEX_BITSET_MATCH_ANY),
      -1);
  EXPECT_EQ(errno, ETIMEDOUT);
}

TEST(MonotonicWaitsTest, EverythingElseIsPassedOn) {
  EXPECT_EQ(syscall(SYS_getpid), getpid());
  uint32_t word = 0;
  // Not the value that is waited for.
  EXPECT_EQ(syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0), -1);
  EXPECT_EQ(errno, EAGAIN);
}

}  // namespace
}  // namespace quern
