// A YAML document as a tree of plain nodes, read as hostile input: size, depth and number of nodes are bounded, and aliases are refused, so
// that no text expands into more than it is.
#ifndef QUERN_DAEMON_RECIPE_YAML_TREE_H_
#define QUERN_DAEMON_RECIPE_YAML_TREE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::daemon {

inline constexpr size_t kMaxRecipeBytes = size_t{1} << 20;
inline constexpr int kMaxRecipeDepth = 32;
inline constexpr size_t kMaxRecipeNodes = 100'000;
inline constexpr size_t kMaxRecipeKeys = 256;  // of one mapping

struct YamlMember;

struct YamlNode {
  enum class Kind { kNull, kScalar, kSequence, kMap };
  Kind kind = Kind::kNull;
  int line = 1;                     // counted from 1
  std::string scalar;               // of kScalar, as text
  std::vector<YamlNode> items;      // of kSequence
  std::vector<YamlMember> members;  // of kMap, in the order of the text; keys are unique

  bool IsNull() const { return kind == Kind::kNull; }
  // The member of that key, or nullptr.
  const YamlNode* Find(absl::string_view key) const;
};

struct YamlMember {
  std::string key;
  YamlNode value;
};

// An empty text is a null node. INVALID_ARGUMENT names the line.
absl::StatusOr<YamlNode> ParseYaml(absl::string_view text);

// "recipe line 3: <what>".
absl::Status RecipeError(int line, absl::string_view what);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RECIPE_YAML_TREE_H_
