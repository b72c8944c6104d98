// The tasks of a job that wait for a worker, by the memory that they need, so that a grant looks at few of a hundred thousand.
#ifndef QUERN_DAEMON_QUEUE_PENDING_TASKS_H_
#define QUERN_DAEMON_QUEUE_PENDING_TASKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>

namespace quern::daemon {

// Not thread-safe.
class PendingTasks {
 public:
  void Insert(uint32_t task, uint64_t minimum_memory);
  // No effect when it is not there.
  void Erase(uint32_t task, uint64_t minimum_memory);
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }

  // The first task, in order of their numbers, that needs no more than `memory` and that `wants`. Gives up after `looks` of them.
  std::optional<uint32_t> First(uint64_t memory, int looks, const std::function<bool(uint32_t)>& wants) const;
  // Of the tasks that need more than `memory`, one that needs least.
  std::optional<uint32_t> LeastAbove(uint64_t memory) const;

 private:
  std::map<uint64_t, std::set<uint32_t>> by_memory_;  // no set is empty
  size_t size_ = 0;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_PENDING_TASKS_H_
