#include "base/byte_size.h"

#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/task_memory.h"

namespace quern {

absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text) {
  static constexpr std::pair<absl::string_view, double> kUnits[] = {{"", 1},         {"b", 1},        {"kib", 0x1p10}, {"mib", 0x1p20},
                                                                    {"gib", 0x1p30}, {"tib", 0x1p40}, {"kb", 1e3},     {"mb", 1e6},
                                                                    {"gb", 1e9},     {"tb", 1e12}};
  const absl::string_view trimmed = absl::StripAsciiWhitespace(text);
  const size_t digits = std::min(trimmed.find_first_not_of("0123456789."), trimmed.size());
  const std::string unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(trimmed.substr(digits)));
  double number;
  if (digits > 0 && absl::SimpleAtod(trimmed.substr(0, digits), &number)) {
    for (const auto& [name, factor] : kUnits) {
      if (unit != name) continue;
      const double bytes = number * factor;
      if (bytes >= 0x1p63) return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is too large: a size is below 8388608TiB"));
      return static_cast<uint64_t>(std::llround(bytes));
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is no size in bytes; write for example 512MiB, 2GiB or 2GB"));
}

std::string FormatByteSize(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1000 && unit < 5; ++unit) value /= 1024;
  return absl::StrFormat("%.3g %s", value, kUnits[unit]);
}

std::string FormatLeastMemory(uint64_t bytes) { return absl::StrCat(bytes / kMiB + (bytes % kMiB != 0 ? 1 : 0), " MiB"); }

}  // namespace quern
