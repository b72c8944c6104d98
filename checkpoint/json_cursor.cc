#include "checkpoint/json_cursor.h"

#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "base/utf8.h"

namespace quern::checkpoint {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

void AppendUtf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (code >> 6)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (code >> 12)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (code >> 18)));
    out->push_back(static_cast<char>(0x80 | ((code >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

}  // namespace

absl::Status JsonCursor::ErrorAt(absl::string_view what, size_t position) const {
  return absl::InvalidArgumentError(absl::StrCat(what, " at offset ", base_offset_ + position));
}

absl::Status JsonCursor::Unexpected(absl::string_view expected) const {
  if (position_ >= text_.size()) return Error(absl::StrCat("the text ends where ", expected, " is expected"));
  const unsigned char c = text_[position_];
  if (c == 0) return Error(absl::StrCat("NUL byte where ", expected, " is expected"));
  if (c > 0x20 && c < 0x7F) return Error(absl::StrFormat("'%c' where %s is expected", c, expected));
  return Error(absl::StrFormat("byte 0x%02x where %s is expected", c, expected));
}

absl::Status JsonCursor::Expect(char c) {
  if (Consume(c)) return absl::OkStatus();
  return Unexpected(absl::StrCat("'", absl::string_view(&c, 1), "'"));
}

absl::Status JsonCursor::ExpectEnd() {
  SkipSpace();
  if (position_ == text_.size()) return absl::OkStatus();
  return Unexpected("the end");
}

absl::Status JsonCursor::Enter(char bracket) {
  QUERN_RETURN_IF_ERROR(Expect(bracket));
  if (++depth_ > kMaxDepth) return Error(absl::StrCat("more than ", kMaxDepth, " levels of nesting"));
  return absl::OkStatus();
}

absl::Status JsonCursor::ReadString(std::string* value) {
  value->clear();
  return ScanString(value);
}

absl::Status JsonCursor::ScanString(std::string* value) {
  if (!Consume('"')) return Unexpected("a string");
  while (true) {
    const size_t run = position_;
    while (position_ < text_.size()) {
      const unsigned char c = text_[position_];
      if (c < 0x20 || c == '"' || c == '\\' || c >= 0x80) break;
      ++position_;
    }
    if (value != nullptr) value->append(text_.data() + run, position_ - run);
    if (position_ >= text_.size()) return Error("a string is not closed");
    const unsigned char c = text_[position_];
    if (c == '"') {
      ++position_;
      return absl::OkStatus();
    }
    if (c == '\\') {
      QUERN_RETURN_IF_ERROR(ScanEscape(value));
    } else if (c < 0x20) {
      return Error(c == 0 ? "NUL byte in a string" : "control character in a string");
    } else {
      const size_t length = Utf8SequenceLength(text_, position_);
      if (length == 0) return Error("invalid UTF-8");
      if (value != nullptr) value->append(text_.data() + position_, length);
      position_ += length;
    }
  }
}

absl::Status JsonCursor::ScanHex4(uint32_t* unit) {
  *unit = 0;
  for (int i = 0; i < 4; ++i, ++position_) {
    if (position_ >= text_.size()) return Error("a string is not closed");
    const char c = text_[position_];
    uint32_t digit;
    if (IsDigit(c)) {
      digit = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else {
      return Error("\\u without four hexadecimal digits");
    }
    *unit = *unit * 16 + digit;
  }
  return absl::OkStatus();
}

absl::Status JsonCursor::ScanEscape(std::string* value) {
  ++position_;  // the backslash
  if (position_ >= text_.size()) return Error("a string is not closed");
  char plain = 0;
  switch (text_[position_]) {
    case '"':
      plain = '"';
      break;
    case '\\':
      plain = '\\';
      break;
    case '/':
      plain = '/';
      break;
    case 'b':
      plain = '\b';
      break;
    case 'f':
      plain = '\f';
      break;
    case 'n':
      plain = '\n';
      break;
    case 'r':
      plain = '\r';
      break;
    case 't':
      plain = '\t';
      break;
    case 'u':
      break;
    default:
      return Error("unknown escape in a string");
  }
  ++position_;
  if (plain != 0) {
    if (value != nullptr) value->push_back(plain);
    return absl::OkStatus();
  }
  uint32_t code;
  QUERN_RETURN_IF_ERROR(ScanHex4(&code));
  if (code >= 0xD800 && code <= 0xDFFF) {
    if (code >= 0xDC00 || !absl::StartsWith(text_.substr(position_), "\\u")) return Error("lone surrogate in a string");
    position_ += 2;
    uint32_t low;
    QUERN_RETURN_IF_ERROR(ScanHex4(&low));
    if (low < 0xDC00 || low > 0xDFFF) return Error("lone surrogate in a string");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  if (value != nullptr) AppendUtf8(code, value);
  return absl::OkStatus();
}

absl::Status JsonCursor::ReadUnsigned(uint64_t* value) {
  SkipSpace();
  const size_t start = position_;
  uint64_t result = 0;
  while (position_ < text_.size() && IsDigit(text_[position_])) {
    const uint64_t digit = text_[position_] - '0';
    if (result > (std::numeric_limits<uint64_t>::max() - digit) / 10) return ErrorAt("an integer does not fit 64 bits", start);
    result = result * 10 + digit;
    ++position_;
  }
  if (position_ == start) return Unexpected("an integer that is not negative");
  if (text_[start] == '0' && position_ - start > 1) return ErrorAt("an integer with a leading zero", start);
  if (position_ < text_.size() && (text_[position_] == '.' || text_[position_] == 'e' || text_[position_] == 'E')) {
    return ErrorAt("a fraction or exponent where an integer is expected", start);
  }
  *value = result;
  return absl::OkStatus();
}

bool JsonCursor::ConsumeWord(absl::string_view word) {
  if (!absl::StartsWith(text_.substr(position_), word)) return false;
  position_ += word.size();
  return true;
}

absl::Status JsonCursor::ScanNumber() {
  const auto digits = [&] {
    const size_t start = position_;
    while (position_ < text_.size() && IsDigit(text_[position_])) ++position_;
    return position_ > start;
  };
  if (position_ < text_.size() && text_[position_] == '-') ++position_;
  if (numbers_ == Numbers::kPython && ConsumeWord("Infinity")) return absl::OkStatus();
  if (ConsumeWord("0")) {
    if (position_ < text_.size() && IsDigit(text_[position_])) return Error("a number with a leading zero");
  } else if (!digits()) {
    return Unexpected("a value");
  }
  if (position_ < text_.size() && text_[position_] == '.') {
    ++position_;
    if (!digits()) return Unexpected("a digit");
  }
  if (position_ < text_.size() && (text_[position_] == 'e' || text_[position_] == 'E')) {
    ++position_;
    if (position_ < text_.size() && (text_[position_] == '+' || text_[position_] == '-')) ++position_;
    if (!digits()) return Unexpected("a digit");
  }
  return absl::OkStatus();
}

absl::Status JsonCursor::SkipValue() {
  SkipSpace();
  if (position_ >= text_.size()) return Unexpected("a value");
  switch (text_[position_]) {
    case '{':
      return ReadObject([this](std::string&) { return SkipValue(); });
    case '[':
      return ReadArray([this] { return SkipValue(); });
    case '"':
      return ScanString(nullptr);
    default:
      break;
  }
  if (ConsumeWord("true") || ConsumeWord("false") || ConsumeWord("null")) return absl::OkStatus();
  if (numbers_ == Numbers::kPython && ConsumeWord("NaN")) return absl::OkStatus();
  return ScanNumber();
}

absl::StatusOr<absl::string_view> JsonCursor::ReadValue() {
  SkipSpace();
  const size_t start = position_;
  QUERN_RETURN_IF_ERROR(SkipValue());
  return text_.substr(start, position_ - start);
}

void AppendQuotedJson(absl::string_view text, std::string* out) {
  out->push_back('"');
  size_t plain = 0;  // where the characters begin that are not appended yet
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool control = static_cast<unsigned char>(c) < 0x20;
    if (c != '"' && c != '\\' && !control) continue;
    out->append(text.data() + plain, i - plain);
    plain = i + 1;
    if (control) {
      absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out->push_back('\\');
      out->push_back(c);
    }
  }
  out->append(text.data() + plain, text.size() - plain);
  out->push_back('"');
}

size_t QuotedJsonSize(absl::string_view text) {
  size_t size = text.size() + 2;
  for (const char c : text) {
    if (c == '"' || c == '\\') size += 1;
    if (static_cast<unsigned char>(c) < 0x20) size += 5;
  }
  return size;
}

std::string QuoteJson(absl::string_view text) {
  std::string quoted;
  quoted.reserve(text.size() + 2);
  AppendQuotedJson(text, &quoted);
  return quoted;
}

bool IsGitLfsPointer(absl::string_view content) { return absl::StartsWith(content, "version https://git-lfs"); }

absl::Status GitLfsPointerError(absl::string_view path) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": this is a Git-LFS pointer, not the file itself; fetch the content with `git lfs pull`"));
}

}  // namespace quern::checkpoint
