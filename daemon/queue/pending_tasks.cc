#include "daemon/queue/pending_tasks.h"

#include <queue>
#include <utility>
#include <vector>

namespace quern::daemon {

void PendingTasks::Insert(uint32_t task, uint64_t minimum_memory) {
  if (by_memory_[minimum_memory].insert(task).second) ++size_;
}

void PendingTasks::Erase(uint32_t task, uint64_t minimum_memory) {
  const auto group = by_memory_.find(minimum_memory);
  if (group == by_memory_.end() || group->second.erase(task) == 0) return;
  --size_;
  if (group->second.empty()) by_memory_.erase(group);
}

std::optional<uint32_t> PendingTasks::First(uint64_t memory, int looks, const std::function<bool(uint32_t)>& wants) const {
  using Cursor = std::pair<std::set<uint32_t>::const_iterator, std::set<uint32_t>::const_iterator>;  // next, end
  const auto later = [](const Cursor& a, const Cursor& b) { return *a.first > *b.first; };
  std::priority_queue<Cursor, std::vector<Cursor>, decltype(later)> next(later);
  for (auto group = by_memory_.begin(); group != by_memory_.end() && group->first <= memory; ++group) {
    next.push({group->second.begin(), group->second.end()});
  }
  for (; !next.empty() && looks > 0; --looks) {
    Cursor cursor = next.top();
    next.pop();
    if (wants(*cursor.first)) return *cursor.first;
    if (++cursor.first != cursor.second) next.push(cursor);
  }
  return std::nullopt;
}

std::optional<uint32_t> PendingTasks::LeastAbove(uint64_t memory) const {
  const auto group = by_memory_.upper_bound(memory);
  if (group == by_memory_.end()) return std::nullopt;
  return *group->second.begin();
}

}  // namespace quern::daemon
