#include "base/log_fields.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace quern {
namespace {

bool IsKey(absl::string_view word) {
  return !word.empty() && std::all_of(word.begin(), word.end(), [](char c) { return absl::ascii_islower(c) || c == '_'; });
}

// Where the quoted text that begins at `begin` ends: at its closing quote, or npos.
size_t ClosingQuote(absl::string_view line, size_t begin) {
  for (size_t i = begin; i < line.size(); ++i) {
    if (line[i] == '\\') {
      ++i;
    } else if (line[i] == '"') {
      return i;
    }
  }
  return absl::string_view::npos;
}

}  // namespace

std::string LogValue(absl::string_view value, size_t longest) {
  const bool plain = !value.empty() && std::all_of(value.begin(), value.end(), [](char c) {
    return absl::ascii_isalnum(c) || absl::string_view("._:/@,+-[]").find(c) != absl::string_view::npos;
  });
  const absl::string_view shown = value.substr(0, longest);
  const char* const cut = shown.size() < value.size() ? "..." : "";
  if (plain) return absl::StrCat(shown, cut);
  return absl::StrCat("\"", absl::CHexEscape(shown), cut, "\"");
}

std::string TaskFields(absl::string_view job, uint32_t task) { return absl::StrCat("job=", LogValue(job), " task=", task); }

std::string AttemptFields(absl::string_view job, uint32_t task, uint32_t attempt) {
  return absl::StrCat(TaskFields(job, task), " attempt=", attempt);
}

std::string MessageField(absl::string_view message) {
  return message.empty() ? "" : absl::StrCat(" message=", LogValue(message, kLongestLogMessage));
}

std::vector<std::pair<std::string, std::string>> ParseLogFields(absl::string_view line) {
  std::vector<std::pair<std::string, std::string>> fields;
  size_t at = 0;
  while (at < line.size()) {
    const size_t space = std::min(line.find(' ', at), line.size());
    const size_t equals = line.find('=', at);
    if (equals >= space || !IsKey(line.substr(at, equals - at))) {
      at = space + 1;
      continue;
    }
    const std::string key(line.substr(at, equals - at));
    if (equals + 1 < line.size() && line[equals + 1] == '"') {
      const size_t end = ClosingQuote(line, equals + 2);
      std::string value;
      if (end == absl::string_view::npos || !absl::CUnescape(line.substr(equals + 2, end - equals - 2), &value)) {
        at = space + 1;
        continue;
      }
      fields.emplace_back(key, std::move(value));
      at = end + 1;
    } else {
      fields.emplace_back(key, std::string(line.substr(equals + 1, space - equals - 1)));
      at = space + 1;
    }
  }
  return fields;
}

}  // namespace quern
