// Where paths of another machine are found here.
#ifndef QUERN_BASE_PATH_MAP_H_
#define QUERN_BASE_PATH_MAP_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quern {

// Prefixes of whole path components, of which the longest that fits is replaced. Copyable; thread-safe once it is made.
class PathMap {
 public:
  // "/theirs=/ours", both absolute and without ".", ".." and "//". INVALID_ARGUMENT for anything else, and for a second mapping of the same
  // prefix.
  absl::Status Add(absl::string_view text);
  // The path here; one that no prefix fits is the same here as there. `root` (may be null) becomes the part of it that a mapping named, "/"
  // without one: the administrator's word, where the rest is that of others.
  std::string Apply(absl::string_view path, std::string* root = nullptr) const;

 private:
  std::vector<std::pair<std::string, std::string>> prefixes_;  // without slashes at their ends
};

}  // namespace quern

#endif  // QUERN_BASE_PATH_MAP_H_
