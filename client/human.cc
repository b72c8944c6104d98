#include "client/human.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace quern::client {

std::string FormatElapsed(absl::Duration duration) {
  if (duration < absl::ZeroDuration() || duration == absl::InfiniteDuration()) return "-";
  const int64_t seconds = absl::ToInt64Seconds(duration);
  const int64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  if (days > 0) return absl::StrFormat("%dd %02d:%02d", days, hours % 24, minutes % 60);
  if (hours > 0) return absl::StrFormat("%d:%02d:%02d", hours, minutes % 60, seconds % 60);
  return absl::StrFormat("%d:%02d", minutes, seconds % 60);
}

std::string FormatRate(uint64_t bytes, absl::Duration duration) {
  const double seconds = absl::ToDoubleSeconds(duration);
  if (seconds <= 0 || !std::isfinite(seconds)) return "-";
  static constexpr const char* kUnits[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  double rate = static_cast<double>(bytes) / seconds;
  int unit = 0;
  for (; rate >= 999.5 && unit < 4; ++unit) rate /= 1000;
  return absl::StrFormat("%.3g %s", rate, kUnits[unit]);
}

std::string FormatSqnr(double sum_squares, double sum_squared_error) {
  if (!(sum_squares > 0)) return "-";
  if (sum_squared_error == 0) return "exact";
  return absl::StrFormat("%.1f dB", 10 * std::log10(sum_squares / sum_squared_error));
}

std::string FormatCount(uint64_t count) {
  std::string digits = absl::StrCat(count);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(at, 1, ',');
  return digits;
}

std::string FormatRanges(std::vector<uint64_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  std::string text;
  for (size_t begin = 0; begin < numbers.size();) {
    size_t end = begin + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    absl::StrAppend(&text, text.empty() ? "" : ", ", numbers[begin]);
    if (end - begin == 2) absl::StrAppend(&text, ", ", numbers[end - 1]);
    if (end - begin > 2) absl::StrAppend(&text, "-", numbers[end - 1]);
    begin = end;
  }
  return text;
}

}  // namespace quern::client
