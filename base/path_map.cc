#include "base/path_map.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace quern {
namespace {

absl::string_view WithoutSlashes(absl::string_view path) {
  while (absl::EndsWith(path, "/")) path.remove_suffix(1);
  return path;
}

bool IsStraight(absl::string_view path) {
  const std::vector<absl::string_view> names = absl::StrSplit(path, '/');
  return std::none_of(names.begin() + 1, names.end(), [](absl::string_view name) { return name.empty() || name == "." || name == ".."; });
}

}  // namespace

absl::Status PathMap::Add(absl::string_view text) {
  // Both sides begin with a slash, so that a path may hold an equals sign.
  const size_t middle = text.find("=/");
  if (!absl::StartsWith(text, "/") || middle == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is no mapping of paths: give two absolute ones, the coordinator's first, such as /mnt/a=/mnt/b"));
  }
  // "/a=/b=/c" may be meant in two ways.
  if (text.find("=/", middle + 1) != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" has more than one \"=/\": it is not clear where the second path begins"));
  }
  const std::string theirs(WithoutSlashes(text.substr(0, middle)));
  const std::string ours(WithoutSlashes(text.substr(middle + 1)));
  for (const std::string& path : {theirs, ours}) {
    if (IsStraight(path)) continue;
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\": a path with \".\", \"..\" or \"//\" fits nothing, write it without"));
  }
  for (const auto& [prefix, other] : prefixes_) {
    if (prefix == theirs) return absl::InvalidArgumentError(absl::StrCat(prefix, "/ is mapped twice"));
  }
  prefixes_.emplace_back(theirs, ours);
  return absl::OkStatus();
}

std::string PathMap::Apply(absl::string_view path, std::string* root) const {
  const std::pair<std::string, std::string>* longest = nullptr;
  for (const auto& entry : prefixes_) {
    const std::string& theirs = entry.first;
    const bool fits = absl::StartsWith(path, theirs) && (path.size() == theirs.size() || path[theirs.size()] == '/');
    if (fits && (longest == nullptr || theirs.size() > longest->first.size())) longest = &entry;
  }
  if (root != nullptr) *root = longest == nullptr || longest->second.empty() ? "/" : longest->second;
  if (longest == nullptr) return std::string(path);
  const std::string mapped = absl::StrCat(longest->second, path.substr(longest->first.size()));
  return mapped.empty() ? "/" : mapped;
}

}  // namespace quern
