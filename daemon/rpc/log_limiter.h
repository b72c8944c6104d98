// Keeps what strangers can cause from filling the log.
#ifndef QUERN_DAEMON_RPC_LOG_LIMITER_H_
#define QUERN_DAEMON_RPC_LOG_LIMITER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log_fields.h"  // LogValue
#include "base/mutex.h"

namespace quern::daemon {

using LogLine = std::function<void(const std::string&)>;

// Lets so many lines a second through; the first one of a later second tells how many were left out. Thread-safe.
class LogLimiter {
 public:
  LogLimiter(LogLine log, Clock* clock, int lines_per_second);
  void Write(const std::string& line);

 private:
  const LogLine log_;
  Clock* const clock_;
  const int most_;
  Mutex mutex_;
  absl::Duration second_ QUERN_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
  int written_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t left_out_ QUERN_GUARDED_BY(mutex_) = 0;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_LOG_LIMITER_H_
