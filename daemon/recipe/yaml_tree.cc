#include "daemon/recipe/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <exception>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace quern::daemon {
namespace {

// Builds the tree from the parser's events. A problem is thrown as yaml-cpp's own exception, which ends the parse at once.
class TreeBuilder : public YAML::EventHandler {
 public:
  std::optional<YamlNode> root;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (root.has_value()) throw YAML::ParserException(mark, "a second document");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { Add(mark, YamlNode::Kind::kNull, "", ""); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw YAML::ParserException(mark, "aliases are not supported; repeat the value");
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, const std::string& value) override {
    const bool null = tag == "?" && (value == "null" || value == "Null" || value == "NULL" || value == "~");
    Add(mark, null ? YamlNode::Kind::kNull : YamlNode::Kind::kScalar, tag, value);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Add(mark, YamlNode::Kind::kSequence, tag, "");
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Add(mark, YamlNode::Kind::kMap, tag, "");
  }
  void OnMapEnd() override { Close(); }

 private:
  struct Open {
    YamlNode node;
    std::optional<std::string> key;  // of a map: the key whose value comes next
  };

  void Add(const YAML::Mark& mark, YamlNode::Kind kind, const std::string& tag, const std::string& value) {
    if (++nodes_ > kMaxRecipeNodes) throw YAML::ParserException(mark, absl::StrCat("more than ", kMaxRecipeNodes, " values"));
    if (!tag.empty() && tag != "?" && tag != "!") {
      throw YAML::ParserException(mark, absl::StrCat("the tag ", tag, " is not supported"));
    }
    if (!open_.empty() && open_.back().node.kind == YamlNode::Kind::kMap && !open_.back().key.has_value()) {
      if (kind != YamlNode::Kind::kScalar) throw YAML::ParserException(mark, "a key must be a plain text");
      if (open_.back().node.members.size() >= kMaxRecipeKeys) {
        throw YAML::ParserException(mark, absl::StrCat("more than ", kMaxRecipeKeys, " keys in one mapping"));
      }
      for (const auto& [key, unused] : open_.back().node.members) {
        if (key == value) throw YAML::ParserException(mark, absl::StrCat("the key \"", value, "\" is there twice"));
      }
      open_.back().key = value;
      return;
    }
    YamlNode node;
    node.kind = kind;
    node.line = mark.line + 1;
    node.scalar = value;
    if (kind == YamlNode::Kind::kSequence || kind == YamlNode::Kind::kMap) {
      if (open_.size() >= static_cast<size_t>(kMaxRecipeDepth)) {
        throw YAML::ParserException(mark, absl::StrCat("nested deeper than ", kMaxRecipeDepth, " levels"));
      }
      open_.push_back({std::move(node), std::nullopt});
      return;
    }
    Attach(std::move(node));
  }

  void Close() {
    YamlNode node = std::move(open_.back().node);
    open_.pop_back();
    Attach(std::move(node));
  }

  void Attach(YamlNode node) {
    if (open_.empty()) {
      root = std::move(node);
    } else if (open_.back().node.kind == YamlNode::Kind::kMap) {
      open_.back().node.members.push_back({*std::move(open_.back().key), std::move(node)});
      open_.back().key.reset();
    } else {
      open_.back().node.items.push_back(std::move(node));
    }
  }

  std::vector<Open> open_;
  size_t nodes_ = 0;
};

}  // namespace

const YamlNode* YamlNode::Find(absl::string_view key) const {
  for (const auto& [name, value] : members) {
    if (name == key) return &value;
  }
  return nullptr;
}

absl::Status RecipeError(int line, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("recipe line ", line, ": ", what));
}

absl::StatusOr<YamlNode> ParseYaml(absl::string_view text) {
  if (text.size() > kMaxRecipeBytes) {
    return absl::InvalidArgumentError(absl::StrCat("recipe: ", text.size(), " bytes; at most ", kMaxRecipeBytes, " are read"));
  }
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    TreeBuilder builder;
    while (parser.HandleNextDocument(builder)) {
    }
    return builder.root.has_value() ? *std::move(builder.root) : YamlNode();
  } catch (const YAML::Exception& error) {
    return RecipeError(error.mark.is_null() ? 1 : error.mark.line + 1, error.msg);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("recipe: ", error.what()));
  }
}

}  // namespace quern::daemon
