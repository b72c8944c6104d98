// Text that others write and that is shown in tables and logs.
#ifndef QUERN_BASE_TEXT_CHECK_H_
#define QUERN_BASE_TEXT_CHECK_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quern {

// Where the first character of `text` stands that does not show as itself but changes what is around it: a control character, an end of a
// line, a mark that turns the direction of the text (U+202E); or a byte that is no UTF-8. npos when there is none.
size_t FindControl(absl::string_view text);

// Likewise, and also spaces of any width and characters that show as nothing.
size_t FindInvisible(absl::string_view text);

// What is kept of a text that a stranger sends to be shown.
inline constexpr size_t kMaxShownText = 4096;

// `text` with a space in place of all that FindControl finds. Of more than `longest` bytes only the first ones, as far as whole characters
// fit, and behind them how many there were.
std::string OneLine(absl::string_view text, size_t longest = kMaxShownText);

// Likewise in full, with its line breaks and tabs.
std::string PlainLines(absl::string_view text);

inline constexpr size_t kMaxCordonReason = 1000;

// What a table shows beside a worker. INVALID_ARGUMENT unless it has at most kMaxCordonReason bytes and nothing that FindControl finds.
absl::Status CheckCordonReason(absl::string_view reason);

}  // namespace quern

#endif  // QUERN_BASE_TEXT_CHECK_H_
