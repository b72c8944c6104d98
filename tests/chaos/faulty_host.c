// Preloaded into a process by the chaos test: its files fail and its wall clock jumps, as the test says in a page that both have mapped.
//
//   QUERN_CHAOS_CONTROL  file with a struct Control
//   QUERN_CHAOS_SOURCE   files below it are slow to read and fail when read
//   QUERN_CHAOS_OUTPUT   files below it fail when written and synced
//
// io_uring is refused, so that all I/O passes here. Waits with an absolute time of the wall clock end by it, also those that were under way
// when it jumped, as the kernel's do.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

// The test writes it.
struct Control {
  _Atomic int64_t clock_offset_ns;
  _Atomic int64_t read_delay_us;
  _Atomic int64_t read_error;  // an errno
  _Atomic int64_t read_errors_left;
  _Atomic int64_t write_error;
  _Atomic int64_t write_errors_left;
};

static struct Control no_faults;
static struct Control* control = &no_faults;
static const char* source;
static const char* output;

static void* Next(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (found == NULL) abort();
  return found;
}

static void RefuseUring(void) {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) abort();
}

__attribute__((constructor)) static void Begin(void) {
  const char* path = getenv("QUERN_CHAOS_CONTROL");
  source = getenv("QUERN_CHAOS_SOURCE");
  output = getenv("QUERN_CHAOS_OUTPUT");
  if (path == NULL) return;
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  if (fd < 0) abort();
  void* page = mmap(NULL, sizeof(struct Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) abort();
  control = page;
  close(fd);
  if (source != NULL) RefuseUring();
}

// ---- Files ----

static int IsBelow(const char* path, const char* directory) {
  if (directory == NULL) return 0;
  const size_t length = strlen(directory);
  return strncmp(path, directory, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

static int FileIsBelow(int fd, const char* directory) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  if (length <= 0) return 0;
  path[length] = '\0';
  return IsBelow(path, directory);
}

static int Take(_Atomic int64_t* left) {
  int64_t now = *left;
  while (now > 0 && !__atomic_compare_exchange_n((int64_t*)left, &now, now - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return now > 0;
}

static int ReadFails(int fd) {
  if (control->read_delay_us == 0 && control->read_errors_left == 0) return 0;
  if (!FileIsBelow(fd, source)) return 0;
  const int64_t delay = control->read_delay_us;
  if (delay > 0) {
    const struct timespec time = {delay / 1000000, delay % 1000000 * 1000};
    nanosleep(&time, NULL);
  }
  if (!Take(&control->read_errors_left)) return 0;
  errno = (int)control->read_error;
  return 1;
}

static int WriteFails(int fd) {
  if (control->write_errors_left == 0 || !FileIsBelow(fd, output) || !Take(&control->write_errors_left)) return 0;
  errno = (int)control->write_error;
  return 1;
}

typedef ssize_t PreadFunction(int, void*, size_t, off_t);
typedef ssize_t PwriteFunction(int, const void*, size_t, off_t);
typedef int SyncFunction(int);

ssize_t pread(int fd, void* to, size_t size, off_t offset) {
  static PreadFunction* next;
  if (next == NULL) next = (PreadFunction*)Next("pread");
  return ReadFails(fd) ? -1 : next(fd, to, size, offset);
}

ssize_t pread64(int fd, void* to, size_t size, off_t offset) { return pread(fd, to, size, offset); }

ssize_t pwrite(int fd, const void* from, size_t size, off_t offset) {
  static PwriteFunction* next;
  if (next == NULL) next = (PwriteFunction*)Next("pwrite");
  return WriteFails(fd) ? -1 : next(fd, from, size, offset);
}

ssize_t pwrite64(int fd, const void* from, size_t size, off_t offset) { return pwrite(fd, from, size, offset); }

int fsync(int fd) {
  static SyncFunction* next;
  if (next == NULL) next = (SyncFunction*)Next("fsync");
  return WriteFails(fd) ? -1 : next(fd);
}

// ---- The wall clock ----

static void Add(struct timespec* time, int64_t ns) {
  const __int128 sum = (__int128)time->tv_sec * 1000000000 + time->tv_nsec + ns;
  if (sum < 0) {
    time->tv_sec = time->tv_nsec = 0;
    return;
  }
  time->tv_sec = (time_t)(sum / 1000000000);
  time->tv_nsec = (long)(sum % 1000000000);
}

int clock_gettime(clockid_t clock, struct timespec* time) {
  static int (*next)(clockid_t, struct timespec*);
  if (next == NULL) next = (int (*)(clockid_t, struct timespec*))Next("clock_gettime");
  const int result = next(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) Add(time, control->clock_offset_ns);
  return result;
}

int gettimeofday(struct timeval* restrict time, void* restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}

typedef int TimedWait(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
typedef int ClockWait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

// A wait by the wall clock is a short one, after which it is looked at again: here, or by who waits for a condition and wakes too early.
// The kernel's own clock does not jump.
static struct timespec SliceEnd(const struct timespec* until) {
  struct timespec end = *until, now;
  Add(&end, -control->clock_offset_ns);
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
  Add(&now, 20 * 1000 * 1000);
  const int is_later = end.tv_sec > now.tv_sec || (end.tv_sec == now.tv_sec && end.tv_nsec > now.tv_nsec);
  return is_later ? now : end;
}

static int HasCome(const struct timespec* until) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec);
}

int pthread_cond_timedwait(pthread_cond_t* restrict condition, pthread_mutex_t* restrict mutex, const struct timespec* restrict until) {
  static TimedWait* next;
  // An older one of the same name expects another layout.
  if (next == NULL) next = (TimedWait*)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if ((condition->__data.__wrefs & 2) != 0) return next(condition, mutex, until);  // by the monotonic clock
  const struct timespec end = SliceEnd(until);
  const int result = next(condition, mutex, &end);
  return result == ETIMEDOUT && !HasCome(until) ? 0 : result;
}

int pthread_cond_clockwait(pthread_cond_t* restrict condition, pthread_mutex_t* restrict mutex, clockid_t clock,
                           const struct timespec* restrict until) {
  static ClockWait* next;
  if (next == NULL) next = (ClockWait*)Next("pthread_cond_clockwait");
  if (clock != CLOCK_REALTIME) return next(condition, mutex, clock, until);
  const struct timespec end = SliceEnd(until);
  const int result = next(condition, mutex, clock, &end);
  return result == ETIMEDOUT && !HasCome(until) ? 0 : result;
}

// Abseil waits by this.
long syscall(long number, ...) {
  static long (*next)(long, ...);
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(arguments, long);
  va_end(arguments);
  if (next == NULL) next = (long (*)(long, ...))Next("syscall");
  if (number != SYS_futex || (a[1] & FUTEX_CLOCK_REALTIME) == 0 || a[3] == 0) return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  const struct timespec* const until = (const struct timespec*)a[3];
  while (1) {
    const struct timespec end = SliceEnd(until);
    const long result = next(number, a[0], a[1], a[2], &end, a[4], a[5]);
    if (result == 0 || errno != ETIMEDOUT || HasCome(until)) return result;
  }
}
