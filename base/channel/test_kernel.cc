#include "base/channel/test_kernel.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>

namespace quern {
namespace {
thread_local std::vector<FutexWait> waits;
}  // namespace

std::vector<FutexWait> FutexWaits() { return waits; }
void ClearFutexWaits() { waits.clear(); }

}  // namespace quern

extern "C" long syscall(long number, ...) noexcept {
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET && a[3] != 0) {
    quern::waits.push_back({static_cast<int>(a[1]), *reinterpret_cast<const timespec*>(a[3])});
  }
  const auto next = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
