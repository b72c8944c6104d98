// Waits of Abseil, and of gRPC through it, that no jump of the wall clock makes longer.
//
// Abseil up to 2023 waits until a time of the wall clock, and gRPC's timers wait that way: after the clock was put back by forty days, a
// process whose timers were all waiting would neither see a deadline pass nor try to connect again for as long. A program that links this
// waits by the monotonic clock instead. It takes the place of the C library's syscall(), by which Abseil waits; all else is passed on.
#include <dlfcn.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace {

using Syscall = long(long, ...);

// No static with a guard: that might wait by syscall() itself.
Syscall* Next() {
  static std::atomic<Syscall*> found{nullptr};
  Syscall* next = found.load(std::memory_order_relaxed);
  if (next != nullptr) return next;
  next = reinterpret_cast<Syscall*>(dlsym(RTLD_NEXT, "syscall"));
  if (next == nullptr) abort();
  found.store(next, std::memory_order_relaxed);
  return next;
}

timespec Now(clockid_t clock) {
  timespec now;
  if (clock_gettime(clock, &now) != 0) abort();
  return now;
}

timespec MonotonicTimeOf(const timespec& wall) {
  constexpr int64_t kBillion = 1'000'000'000;
  const timespec now = Now(CLOCK_REALTIME), monotonic = Now(CLOCK_MONOTONIC);
  int64_t seconds = monotonic.tv_sec + (wall.tv_sec - now.tv_sec);
  int64_t nanoseconds = monotonic.tv_nsec + (wall.tv_nsec - now.tv_nsec);
  if (nanoseconds < 0) {
    nanoseconds += kBillion;
    --seconds;
  } else if (nanoseconds >= kBillion) {
    nanoseconds -= kBillion;
    ++seconds;
  }
  if (seconds < 0) return {0, 0};  // long past, which the kernel refuses to be told
  return {seconds, nanoseconds};
}

}  // namespace

// Like the C library's own it takes six arguments, however few there are; AddressSanitizer would stop at the caller's stack.
extern "C" __attribute__((no_sanitize("address"))) long syscall(long number, ...) noexcept {
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  constexpr long kWait = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
  timespec until;
  if (number == SYS_futex && (a[1] & ~FUTEX_PRIVATE_FLAG) == kWait && a[3] != 0) {
    until = MonotonicTimeOf(*reinterpret_cast<const timespec*>(a[3]));
    a[1] &= ~FUTEX_CLOCK_REALTIME;
    a[3] = reinterpret_cast<long>(&until);
  }
  return Next()(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
