// How fast the tasks of a job have been.
#ifndef QUERN_DAEMON_QUEUE_TASK_TIMES_H_
#define QUERN_DAEMON_QUEUE_TASK_TIMES_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace quern::daemon {

// Keeps the last 64. Not thread-safe.
class TaskTimes {
 public:
  void Add(double seconds_per_byte) {
    if (last_.size() < kKept) {
      last_.push_back(seconds_per_byte);
    } else {
      last_[next_] = seconds_per_byte;
      next_ = (next_ + 1) % kKept;
    }
    std::vector<double> sorted = last_;
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    median_ = sorted[sorted.size() / 2];
  }
  size_t count() const { return last_.size(); }
  // 0 when there is none.
  double median() const { return median_; }

 private:
  static constexpr size_t kKept = 64;
  std::vector<double> last_;
  size_t next_ = 0;
  double median_ = 0;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_TASK_TIMES_H_
