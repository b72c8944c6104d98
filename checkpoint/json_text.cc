#include "checkpoint/json_text.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "checkpoint/json_cursor.h"

namespace quern::checkpoint {
namespace {

struct Member {
  std::string key;
  size_t key_begin = 0;  // at the quote
  size_t key_end = 0;    // behind the quote
  size_t value_begin = 0;
  size_t value_end = 0;
};

struct Object {
  size_t begin = 0;  // at '{'
  size_t end = 0;    // behind '}'
  std::vector<Member> members;
};

JsonCursor Cursor(absl::string_view text) { return JsonCursor(text, JsonCursor::Numbers::kPython); }

bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

// The first position at or after `position` that is no white space.
size_t SkipSpace(absl::string_view text, size_t position) {
  while (position < text.size() && IsSpace(text[position])) ++position;
  return position;
}

// The white space that ends at `position`.
absl::string_view SpaceBefore(absl::string_view text, size_t position) {
  size_t begin = position;
  while (begin > 0 && IsSpace(text[begin - 1])) --begin;
  return text.substr(begin, position - begin);
}

// The object that begins at `position` of a text that has been checked.
absl::StatusOr<Object> ReadObjectAt(absl::string_view text, size_t position) {
  JsonCursor cursor = Cursor(text);
  cursor.set_position(position);
  Object object;
  object.begin = SkipSpace(text, position);
  size_t next = object.begin + 1;  // where the next key's white space begins
  QUERN_RETURN_IF_ERROR(cursor.ReadObject([&](std::string& key) -> absl::Status {
    Member member;
    member.key = std::move(key);
    member.key_begin = SkipSpace(text, next);
    // The key ends before the colon that the cursor has just passed, and the white space in front of it.
    const size_t colon = cursor.position() - 1;
    member.key_end = colon - SpaceBefore(text, colon).size();
    QUERN_ASSIGN_OR_RETURN(absl::string_view value, cursor.ReadValue());
    member.value_end = cursor.position();
    member.value_begin = member.value_end - value.size();
    next = SkipSpace(text, member.value_end) + 1;  // behind the comma
    object.members.push_back(std::move(member));
    return absl::OkStatus();
  }));
  object.end = cursor.position();
  return object;
}

// Position of the member in object.members, or nullopt. The same key twice is refused: readers differ in which one counts.
absl::StatusOr<std::optional<size_t>> FindMember(const Object& object, absl::string_view key) {
  std::optional<size_t> found;
  for (size_t i = 0; i < object.members.size(); ++i) {
    if (object.members[i].key != key) continue;
    if (found) {
      return absl::InvalidArgumentError(
          absl::StrCat("the key ", QuoteJson(key), " stands twice, the second time at offset ", object.members[i].key_begin));
    }
    found = i;
  }
  return found;
}

struct Found {
  Object object;     // the one that holds the member
  size_t index = 0;  // of the member
};

absl::StatusOr<std::optional<Found>> Find(absl::string_view text, absl::string_view dotted_key) {
  QUERN_RETURN_IF_ERROR(CheckJsonText(text));
  size_t position = 0;
  const std::vector<absl::string_view> keys = absl::StrSplit(dotted_key, '.');
  for (size_t level = 0;; ++level) {
    QUERN_ASSIGN_OR_RETURN(Object object, ReadObjectAt(text, position));
    QUERN_ASSIGN_OR_RETURN(std::optional<size_t> index, FindMember(object, keys[level]));
    if (!index) return std::optional<Found>();
    if (level + 1 == keys.size()) return std::optional<Found>(Found{std::move(object), *index});
    position = object.members[*index].value_begin;
    if (text[position] != '{') return std::optional<Found>();
  }
}

// What follows the last line break of white space: the indentation of what comes behind it. Empty when all is on one line.
absl::string_view Indentation(absl::string_view space) {
  const size_t line_break = space.rfind('\n');
  return line_break == absl::string_view::npos ? absl::string_view() : space.substr(line_break + 1);
}

std::string Indented(absl::string_view value, absl::string_view indentation) {
  return absl::StrReplaceAll(value, {{"\n", absl::StrCat("\n", indentation)}});
}

std::string Splice(absl::string_view text, size_t begin, size_t end, absl::string_view replacement) {
  return absl::StrCat(text.substr(0, begin), replacement, text.substr(end));
}

}  // namespace

absl::Status CheckJsonText(absl::string_view text) {
  JsonCursor cursor = Cursor(text);
  QUERN_RETURN_IF_ERROR(cursor.SkipValue());
  return cursor.ExpectEnd();
}

absl::StatusOr<std::optional<std::string>> GetJsonMember(absl::string_view text, absl::string_view dotted_key) {
  QUERN_ASSIGN_OR_RETURN(std::optional<Found> found, Find(text, dotted_key));
  if (!found) return std::optional<std::string>();
  const Member& member = found->object.members[found->index];
  return std::optional<std::string>(std::string(text.substr(member.value_begin, member.value_end - member.value_begin)));
}

absl::StatusOr<std::string> SetJsonMember(absl::string_view text, absl::string_view key, absl::string_view value) {
  QUERN_RETURN_IF_ERROR(Annotate(CheckJsonText(value), absl::StrCat("the new value of ", QuoteJson(key))));
  QUERN_RETURN_IF_ERROR(CheckJsonText(text));
  QUERN_ASSIGN_OR_RETURN(Object object, ReadObjectAt(text, 0));
  QUERN_ASSIGN_OR_RETURN(std::optional<size_t> index, FindMember(object, key));
  if (index) {
    const Member& member = object.members[*index];
    return Splice(text, member.value_begin, member.value_end, Indented(value, Indentation(SpaceBefore(text, member.key_begin))));
  }
  if (object.members.empty()) {
    return Splice(text, object.begin, object.end, absl::StrCat("{\n  ", QuoteJson(key), ": ", Indented(value, "  "), "\n}"));
  }
  const Member& last = object.members.back();
  absl::string_view space = SpaceBefore(text, last.key_begin);
  // `{"a": 1}` has no white space to copy; Python would put a space behind the comma.
  if (space.empty() && object.members.size() == 1 && last.value_begin > last.key_end + 1) space = " ";
  return Splice(text, last.value_end, last.value_end,
                absl::StrCat(",", space, QuoteJson(key), text.substr(last.key_end, last.value_begin - last.key_end),
                             Indented(value, Indentation(space))));
}

absl::StatusOr<std::string> RemoveJsonMember(absl::string_view text, absl::string_view dotted_key) {
  QUERN_ASSIGN_OR_RETURN(std::optional<Found> found, Find(text, dotted_key));
  if (!found) return std::string(text);
  const std::vector<Member>& members = found->object.members;
  const size_t index = found->index;
  if (members.size() == 1) return Splice(text, found->object.begin, found->object.end, "{}");
  if (index == 0) return Splice(text, members[0].key_begin, members[1].key_begin, "");
  return Splice(text, members[index - 1].value_end, members[index].value_end, "");
}

}  // namespace quern::checkpoint
