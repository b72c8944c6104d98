#include "base/path_map.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace quern {
namespace {

absl::string_view WithoutSlashes(absl::string_view path) {
  while (absl::EndsWith(path, "/")) path.remove_suffix(1);
  return path;
}

}  // namespace

absl::Status PathMap::Add(absl::string_view text) {
  // Both sides begin with a slash, so that a path may hold an equals sign.
  const size_t middle = text.find("=/");
  if (!absl::StartsWith(text, "/") || middle == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is no mapping of paths: give two absolute ones, the coordinator's first, such as /mnt/a=/mnt/b"));
  }
  const std::string theirs(WithoutSlashes(text.substr(0, middle)));
  for (const auto& [prefix, ours] : prefixes_) {
    if (prefix == theirs) return absl::InvalidArgumentError(absl::StrCat(prefix, "/ is mapped twice"));
  }
  prefixes_.emplace_back(theirs, std::string(WithoutSlashes(text.substr(middle + 1))));
  return absl::OkStatus();
}

std::string PathMap::Apply(absl::string_view path) const {
  const std::pair<std::string, std::string>* longest = nullptr;
  for (const auto& entry : prefixes_) {
    const std::string& theirs = entry.first;
    const bool fits = absl::StartsWith(path, theirs) && (path.size() == theirs.size() || path[theirs.size()] == '/');
    if (fits && (longest == nullptr || theirs.size() > longest->first.size())) longest = &entry;
  }
  if (longest == nullptr) return std::string(path);
  const std::string mapped = absl::StrCat(longest->second, path.substr(longest->first.size()));
  return mapped.empty() ? "/" : mapped;
}

}  // namespace quern
