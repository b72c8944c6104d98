// Times on command lines.
#ifndef QUERN_BASE_TIME_OPTION_H_
#define QUERN_BASE_TIME_OPTION_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace quern {

// "30s", "1h30m" or "1.5h": numbers with h, m, s or ms, each unit at most once and the largest first. INVALID_ARGUMENT for anything else,
// and for what is not from `least` to `most`.
absl::StatusOr<absl::Duration> ParseTimeOption(absl::string_view text, absl::Duration least, absl::Duration most);

}  // namespace quern

#endif  // QUERN_BASE_TIME_OPTION_H_
