// A syscall() for monotonic_waits_test.cc that writes down how it was asked to wait, and does what it was asked.
#ifndef QUERN_BASE_CHANNEL_TEST_KERNEL_H_
#define QUERN_BASE_CHANNEL_TEST_KERNEL_H_

#include <time.h>

#include <vector>

namespace quern {

struct FutexWait {
  int operation;
  timespec until;
};

// Those with an end, of this thread.
std::vector<FutexWait> FutexWaits();
void ClearFutexWaits();

}  // namespace quern

#endif  // QUERN_BASE_CHANNEL_TEST_KERNEL_H_
