#include "daemon/planner/module_names.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace quern::daemon {
namespace {

constexpr size_t kNumberDigits = 9;

// "0-3,7" of {0, 1, 2, 3, 7}.
std::string Ranges(const std::set<uint32_t>& numbers) {
  std::vector<std::string> ranges;
  for (auto it = numbers.begin(); it != numbers.end();) {
    const uint32_t first = *it;
    uint32_t last = first;
    while (++it != numbers.end() && *it == last + 1) last = *it;
    ranges.push_back(first == last ? absl::StrCat(first) : absl::StrCat(first, last == first + 1 ? "," : "-", last));
  }
  return absl::StrJoin(ranges, ",");
}

}  // namespace

bool IsNumber(absl::string_view component) {
  if (component.empty() || component.size() > kNumberDigits) return false;
  if (component.size() > 1 && component[0] == '0') return false;
  return std::all_of(component.begin(), component.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string NaturalKey(absl::string_view name) {
  std::string key;
  key.reserve(name.size() + 2 * kNumberDigits);
  for (absl::string_view component : absl::StrSplit(name, '.')) {
    if (!key.empty()) key.push_back('.');
    if (IsNumber(component)) key.append(kNumberDigits - component.size(), '0');
    key.append(component.data(), component.size());
  }
  return key;
}

std::string NameTemplate(absl::string_view name) {
  std::string result;
  result.reserve(name.size());
  bool first = true;
  for (absl::string_view component : absl::StrSplit(name, '.')) {
    if (!first) result.push_back('.');
    first = false;
    if (IsNumber(component)) component = "#";
    result.append(component.data(), component.size());
  }
  return result;
}

std::vector<std::string> SummarizeNames(const std::vector<std::string>& names) {
  struct Kind {
    std::string name_template;
    const std::string* only = nullptr;
    uint64_t count = 0;
    std::vector<std::set<uint32_t>> numbers;
  };
  std::vector<Kind> kinds;
  absl::flat_hash_map<std::string, size_t> by_template;
  for (const std::string& name : names) {
    std::string name_template = NameTemplate(name);
    const auto [entry, added] = by_template.try_emplace(name_template, kinds.size());
    if (added) kinds.push_back({std::move(name_template), &name, 0, {}});
    Kind& kind = kinds[entry->second];
    ++kind.count;
    size_t position = 0;
    for (absl::string_view component : absl::StrSplit(name, '.')) {
      uint32_t number;
      if (!IsNumber(component) || !absl::SimpleAtoi(component, &number)) continue;
      if (position == kind.numbers.size()) kind.numbers.emplace_back();
      kind.numbers[position++].insert(number);
    }
  }
  std::vector<std::string> lines;
  for (const Kind& kind : kinds) {
    if (kind.count == 1) {
      lines.push_back(*kind.only);
      continue;
    }
    std::string line;
    size_t position = 0;
    for (absl::string_view component : absl::StrSplit(kind.name_template, '.')) {
      if (!line.empty()) line.push_back('.');
      if (component == "#" && position < kind.numbers.size()) {
        const std::set<uint32_t>& numbers = kind.numbers[position++];
        absl::StrAppend(&line, numbers.size() == 1 ? absl::StrCat(*numbers.begin()) : absl::StrCat("{", Ranges(numbers), "}"));
      } else {
        absl::StrAppend(&line, component);
      }
    }
    lines.push_back(absl::StrCat(line, " (", kind.count, " modules)"));
  }
  return lines;
}

}  // namespace quern::daemon
