// A few threads for work that blocks.
#ifndef QUERN_DAEMON_RPC_THREAD_POOL_H_
#define QUERN_DAEMON_RPC_THREAD_POOL_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace quern::daemon {

// Thread-safe. The destructor runs everything that was scheduled, then returns; nothing may be scheduled after it has begun, except by
// the work itself.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void Schedule(std::function<void()> work);

 private:
  void Run();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> work_ QUERN_GUARDED_BY(mutex_);
  bool closing_ QUERN_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// Calls a function at an interval on a thread of its own, until destroyed.
class Ticker {
 public:
  Ticker(absl::Duration interval, std::function<void()> tick);
  ~Ticker();
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

 private:
  Mutex mutex_;
  CondVar changed_;
  bool closing_ QUERN_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_THREAD_POOL_H_
