#include "daemon/rpc/thread_pool.h"

#include <utility>

namespace quern::daemon {

ThreadPool::ThreadPool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Schedule(std::function<void()> work) {
  MutexLock lock(&mutex_);
  work_.push_back(std::move(work));
  changed_.Signal();
}

void ThreadPool::Run() {
  while (true) {
    std::function<void()> work;
    {
      MutexLock lock(&mutex_);
      while (work_.empty() && !closing_) changed_.Wait(&mutex_);
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

Ticker::Ticker(absl::Duration interval, std::function<void()> tick)
    : thread_([this, interval, tick = std::move(tick)] {
        while (true) {
          {
            MutexLock lock(&mutex_);
            if (!closing_) changed_.WaitFor(&mutex_, interval);
            if (closing_) return;
          }
          tick();
        }
      }) {}

Ticker::~Ticker() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

}  // namespace quern::daemon
