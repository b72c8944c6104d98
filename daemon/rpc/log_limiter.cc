#include "daemon/rpc/log_limiter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace quern::daemon {
namespace {

constexpr size_t kLongestValue = 200;

}  // namespace

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

std::string LogValue(absl::string_view value) {
  const bool plain = !value.empty() && std::all_of(value.begin(), value.end(), [](char c) {
    return absl::ascii_isalnum(c) || absl::string_view("._:/@,+-[]").find(c) != absl::string_view::npos;
  });
  const absl::string_view shown = value.substr(0, kLongestValue);
  const char* const cut = shown.size() < value.size() ? "..." : "";
  if (plain) return absl::StrCat(shown, cut);
  return absl::StrCat("\"", absl::CHexEscape(shown), cut, "\"");
}

}  // namespace quern::daemon
