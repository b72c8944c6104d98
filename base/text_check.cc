#include "base/text_check.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/utf8.h"

namespace quern {
namespace {

// Of a well-formed sequence.
uint32_t CodePoint(absl::string_view sequence) {
  constexpr unsigned kLeadBits[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
  uint32_t point = static_cast<unsigned char>(sequence[0]) & kLeadBits[sequence.size()];
  for (const char c : sequence.substr(1)) point = point << 6 | (static_cast<unsigned char>(c) & 0x3F);
  return point;
}

bool IsControl(uint32_t c) {
  const auto within = [c](uint32_t first, uint32_t last) { return c >= first && c <= last; };
  return c < 0x20 || within(0x7F, 0x9F) || c == 0x061C || within(0x200E, 0x200F) || within(0x2028, 0x202E) || within(0x2066, 0x206F) ||
         c == 0xFEFF || within(0xFFF9, 0xFFFB) || within(0xE0000, 0xE0FFF);
}

bool IsInvisible(uint32_t c) {
  const auto within = [c](uint32_t first, uint32_t last) { return c >= first && c <= last; };
  return IsControl(c) || c == ' ' || c == 0xA0 || c == 0xAD || c == 0x034F || within(0x115F, 0x1160) || c == 0x1680 ||
         within(0x17B4, 0x17B5) || within(0x180B, 0x180F) || within(0x2000, 0x200D) || c == 0x202F || within(0x205F, 0x2065) ||
         c == 0x2800 || c == 0x3000 || c == 0x3164 || within(0xFE00, 0xFE0F) || c == 0xFFA0 || within(0xFFF0, 0xFFF8);
}

size_t FindFirst(absl::string_view text, bool (*is_wanted)(uint32_t)) {
  for (size_t position = 0; position < text.size();) {
    const size_t length = Utf8SequenceLength(text, position);
    if (length == 0 || is_wanted(CodePoint(text.substr(position, length)))) return position;
    position += length;
  }
  return absl::string_view::npos;
}

std::string WithoutControls(absl::string_view text, absl::string_view kept) {
  std::string plain;
  plain.reserve(text.size());
  for (size_t position = 0; position < text.size();) {
    const size_t length = Utf8SequenceLength(text, position);
    const absl::string_view sequence = text.substr(position, length);
    const bool shows = length > 0 && (!IsControl(CodePoint(sequence)) || kept.find(sequence) != absl::string_view::npos);
    if (shows) {
      plain.append(sequence.data(), sequence.size());
    } else {
      plain += ' ';
    }
    position += length > 0 ? length : 1;
  }
  return plain;
}

}  // namespace

std::string OneLine(absl::string_view text, size_t longest) {
  if (text.size() <= longest) return WithoutControls(text, "");
  size_t end = longest;
  // No character has more than three bytes behind its first.
  while (end > 0 && longest - end < 3 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return absl::StrCat(WithoutControls(text.substr(0, end), ""), "... (cut here: it has ", text.size(), " bytes)");
}

std::string PlainLines(absl::string_view text) { return WithoutControls(text, "\n\t"); }

size_t FindControl(absl::string_view text) { return FindFirst(text, IsControl); }

size_t FindInvisible(absl::string_view text) { return FindFirst(text, IsInvisible); }

absl::Status CheckCordonReason(absl::string_view reason) {
  if (reason.size() > kMaxCordonReason) {
    return absl::InvalidArgumentError(absl::StrCat("the reason has ", reason.size(), " bytes, more than ", kMaxCordonReason));
  }
  if (const size_t at = FindControl(reason); at != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("the reason has a line break or another character that controls the text, at byte ", at));
  }
  return absl::OkStatus();
}

}  // namespace quern
