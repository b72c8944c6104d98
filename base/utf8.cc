#include "base/utf8.h"

#include "absl/strings/escaping.h"

namespace quern {

size_t Utf8SequenceLength(absl::string_view text, size_t position) {
  const auto byte = [&](size_t i) -> unsigned { return position + i < text.size() ? static_cast<unsigned char>(text[position + i]) : 0; };
  const auto continues = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (lead == 0xE0 && byte(1) < 0xA0) return 0;
    if (lead == 0xED && byte(1) > 0x9F) return 0;
    return continues(1) && continues(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (lead == 0xF0 && byte(1) < 0x90) return 0;
    if (lead == 0xF4 && byte(1) > 0x8F) return 0;
    return continues(1) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

bool IsValidUtf8(absl::string_view text) {
  for (size_t position = 0; position < text.size();) {
    const size_t length = Utf8SequenceLength(text, position);
    if (length == 0) return false;
    position += length;
  }
  return true;
}

std::string EscapeUnlessUtf8(absl::string_view text) { return IsValidUtf8(text) ? std::string(text) : absl::CHexEscape(text); }

}  // namespace quern
