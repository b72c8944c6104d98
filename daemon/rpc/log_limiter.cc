#include "daemon/rpc/log_limiter.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace quern::daemon {

LogLimiter::LogLimiter(LogLine log, Clock* clock, int lines_per_second) : log_(std::move(log)), clock_(clock), most_(lines_per_second) {}

void LogLimiter::Write(const std::string& line) {
  if (!log_) return;
  uint64_t left_out = 0;
  {
    const absl::Duration now = clock_->Monotonic();
    MutexLock lock(&mutex_);
    if (now - second_ >= absl::Seconds(1)) {
      second_ = now;
      written_ = 0;
      left_out = std::exchange(left_out_, 0);
    }
    if (written_ >= most_) {
      ++left_out_;
      return;
    }
    ++written_;
  }
  if (left_out > 0) log_(absl::StrCat("audit event=left_out lines=", left_out));
  log_(line);
}

}  // namespace quern::daemon
