// std::mutex with thread-safety annotations. Debian's absl::Mutex is not instrumented for ThreadSanitizer; this one is.
#ifndef QUERN_BASE_MUTEX_H_
#define QUERN_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"
#include "base/thread_annotations.h"

namespace quern {

class QUERN_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() QUERN_ACQUIRE() { mutex_.lock(); }
  void Unlock() QUERN_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class QUERN_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) QUERN_ACQUIRE(mutex) : mutex_(mutex) { mutex_->Lock(); }
  ~MutexLock() QUERN_RELEASE() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

// Waits for a condition that another thread makes true under the same Mutex. Spurious wakeups happen: wait in a loop.
class CondVar {
 public:
  void Wait(Mutex* mutex) QUERN_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
  }
  // Returns false when `timeout` passed first.
  bool WaitFor(Mutex* mutex, absl::Duration timeout) QUERN_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const bool signalled = cv_.wait_for(lock, absl::ToChronoNanoseconds(timeout)) == std::cv_status::no_timeout;
    lock.release();
    return signalled;
  }
  void Signal() { cv_.notify_one(); }
  void SignalAll() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace quern

#endif  // QUERN_BASE_MUTEX_H_
