#include "base/time_option.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace quern {

absl::StatusOr<absl::Duration> ParseTimeOption(absl::string_view text, absl::Duration least, absl::Duration most) {
  const std::pair<absl::string_view, absl::Duration> units[] = {
      {"h", absl::Hours(1)}, {"m", absl::Minutes(1)}, {"s", absl::Seconds(1)}, {"ms", absl::Milliseconds(1)}};
  absl::string_view rest = text;
  absl::Duration total;
  bool understood = !text.empty();
  for (const auto& [name, unit] : units) {
    const absl::string_view number = rest.substr(0, std::min(rest.find_first_not_of("0123456789."), rest.size()));
    const absl::string_view behind = rest.substr(number.size());
    // "5ms" is no five minutes.
    if (number.empty() || behind.substr(0, std::min(behind.find_first_of("0123456789."), behind.size())) != name) continue;
    double value = 0;
    understood = understood && absl::SimpleAtod(number, &value);
    total += value * unit;
    rest = behind.substr(name.size());
  }
  if (understood && rest.empty() && total >= least && total <= most) return total;
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is no time from ", absl::FormatDuration(least), " to ",
                                                 absl::FormatDuration(most), ", such as 30s, 2m or 11h30m"));
}

}  // namespace quern
