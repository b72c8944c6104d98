// A strict, bounded reader of JSON text, for hostile input: no copies but the strings asked for, at most kMaxDepth levels, every error
// with its offset. Private to this room.
#ifndef QUERN_CHECKPOINT_JSON_CURSOR_H_
#define QUERN_CHECKPOINT_JSON_CURSOR_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace quern::checkpoint {

// Borrows the text. After an error the position is where it was found; nothing more may be read.
class JsonCursor {
 public:
  static constexpr int kMaxDepth = 200;
  enum class Numbers {
    kJson,
    kPython,  // also Infinity, -Infinity and NaN
  };

  // `base_offset` is added to the offsets in messages: where `text` begins in its file.
  explicit JsonCursor(absl::string_view text, Numbers numbers = Numbers::kJson, uint64_t base_offset = 0)
      : text_(text), numbers_(numbers), base_offset_(base_offset) {}

  // Into `text`, not counting the base offset.
  size_t position() const { return position_; }
  void set_position(size_t position) { position_ = position; }

  // INVALID_ARGUMENT "<what> at offset <base + position>".
  absl::Status Error(absl::string_view what) const { return ErrorAt(what, position_); }
  absl::Status ErrorAt(absl::string_view what, size_t position) const;

  // Skips white space; whether `c` comes next.
  bool NextIs(char c) {
    SkipSpace();
    return position_ < text_.size() && text_[position_] == c;
  }
  bool Consume(char c) {
    if (!NextIs(c)) return false;
    ++position_;
    return true;
  }
  absl::Status Expect(char c);
  // Nothing but white space may follow.
  absl::Status ExpectEnd();

  // A string, decoded to UTF-8. Bad escapes, lone surrogates, raw control characters and invalid UTF-8 are errors.
  absl::Status ReadString(std::string* value);
  // An integer in [0, 2^64) without sign, fraction, exponent or leading zero.
  absl::Status ReadUnsigned(uint64_t* value);
  // Any value; its text, without the white space around it.
  absl::StatusOr<absl::string_view> ReadValue();
  absl::Status SkipValue();

  // `visit(std::string& key)` must read the value and may move the key away; it returns absl::Status.
  template <typename Visit>
  absl::Status ReadObject(Visit visit) {
    QUERN_RETURN_IF_ERROR(Enter('{'));
    if (!Consume('}')) {
      std::string key;
      do {
        QUERN_RETURN_IF_ERROR(ReadString(&key));
        QUERN_RETURN_IF_ERROR(Expect(':'));
        QUERN_RETURN_IF_ERROR(visit(key));
      } while (Consume(','));
      QUERN_RETURN_IF_ERROR(Expect('}'));
    }
    --depth_;
    return absl::OkStatus();
  }

  // `visit()` must read one element.
  template <typename Visit>
  absl::Status ReadArray(Visit visit) {
    QUERN_RETURN_IF_ERROR(Enter('['));
    if (!Consume(']')) {
      do {
        QUERN_RETURN_IF_ERROR(visit());
      } while (Consume(','));
      QUERN_RETURN_IF_ERROR(Expect(']'));
    }
    --depth_;
    return absl::OkStatus();
  }

 private:
  void SkipSpace() {
    while (position_ < text_.size()) {
      const char c = text_[position_];
      if (c != ' ' && c != '\n' && c != '\t' && c != '\r') return;
      ++position_;
    }
  }
  absl::Status Enter(char bracket);
  absl::Status Unexpected(absl::string_view expected) const;
  // Scans a string; with `value` null it is only checked.
  absl::Status ScanString(std::string* value);
  absl::Status ScanEscape(std::string* value);
  absl::Status ScanHex4(uint32_t* unit);
  absl::Status ScanNumber();
  bool ConsumeWord(absl::string_view word);

  absl::string_view text_;
  Numbers numbers_;
  uint64_t base_offset_;
  size_t position_ = 0;
  int depth_ = 0;
};

// `text` as a JSON string with its quotes. UTF-8 stays as it is.
std::string QuoteJson(absl::string_view text);
// Its size.
size_t QuotedJsonSize(absl::string_view text);
void AppendQuotedJson(absl::string_view text, std::string* out);

// Whether a file's first bytes are those of a Git-LFS pointer, which stands where the content was not fetched.
bool IsGitLfsPointer(absl::string_view content);
// INVALID_ARGUMENT that says so and what to do.
absl::Status GitLfsPointerError(absl::string_view path);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_JSON_CURSOR_H_
