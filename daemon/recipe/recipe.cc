#include "daemon/recipe/recipe.h"

#include <re2/re2.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "daemon/recipe/quantization_args.h"
#include "daemon/recipe/yaml_tree.h"

namespace quern::daemon {
namespace {

constexpr size_t kMaxPatternBytes = 4096;
constexpr size_t kMaxPatterns = 4096;
constexpr char kLinear[] = "Linear";

// `pattern` with * for any text and ? for any one byte, against the whole of `text`.
bool GlobMatches(absl::string_view pattern, absl::string_view text) {
  size_t p = 0, t = 0;
  size_t star = absl::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || (pattern[p] != '*' && pattern[p] == text[t]))) {
      ++p;
      ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (star != absl::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

// A pattern or key as written, with its place.
struct Text {
  std::string value;
  int line = 0;  // 0: of the command line
};

absl::Status ErrorAt(int line, absl::string_view what) { return line > 0 ? RecipeError(line, what) : absl::InvalidArgumentError(what); }

absl::Status AnnotateAt(int line, const absl::Status& status) { return status.ok() ? status : ErrorAt(line, status.message()); }

struct GroupDraft {
  int line = 0;
  std::vector<Text> targets;  // empty: the default
  std::optional<Text> scheme;
  std::optional<quant::SchemeSpec> weights;  // of a custom scheme; excludes `scheme`
  std::optional<Text> group_size;
  std::optional<Text> observer;
};

struct Draft {
  std::vector<GroupDraft> groups;
  std::optional<GroupDraft> last;  // the top-level group, tried after the others
  std::optional<Text> group_size;  // of the top level: of every preset that has none of its own
  std::optional<Text> observer;    // as above
  std::vector<Text> ignore;
  std::optional<Text> non_divisible, nonfinite, numerics;
};

absl::Status RefuseUnknownKeys(const YamlNode& map, absl::string_view where, std::initializer_list<absl::string_view> known) {
  for (const auto& [key, value] : map.members) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return RecipeError(value.line, absl::StrCat("unknown key \"", key, "\" in ", where, "; known: ", absl::StrJoin(known, ", ")));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Text> Scalar(const YamlNode& node, absl::string_view key) {
  if (node.kind != YamlNode::Kind::kScalar) return RecipeError(node.line, absl::StrCat("\"", key, "\" must be a single value"));
  return Text{node.scalar, node.line};
}

absl::StatusOr<std::optional<Text>> OptionalScalar(const YamlNode& map, absl::string_view key) {
  const YamlNode* node = map.Find(key);
  if (node == nullptr || node->IsNull()) return std::optional<Text>();
  QUERN_ASSIGN_OR_RETURN(Text text, Scalar(*node, key));
  return std::optional<Text>(std::move(text));
}

// A list of texts, or one text alone.
absl::StatusOr<std::vector<Text>> TextList(const YamlNode& map, absl::string_view key) {
  std::vector<Text> list;
  const YamlNode* node = map.Find(key);
  if (node == nullptr || node->IsNull()) return list;
  if (node->kind == YamlNode::Kind::kScalar) {
    list.push_back({node->scalar, node->line});
    return list;
  }
  if (node->kind != YamlNode::Kind::kSequence) return RecipeError(node->line, absl::StrCat("\"", key, "\" must be a list"));
  for (const YamlNode& item : node->items) {
    if (item.kind != YamlNode::Kind::kScalar) {
      return RecipeError(item.line, absl::StrCat("an entry of \"", key, "\" must be a text, in quotes where it begins with * or ?"));
    }
    list.push_back({item.scalar, item.line});
  }
  return list;
}

// Targets that are there and empty would silently mean the default.
absl::StatusOr<std::vector<Text>> TargetList(const YamlNode& map, absl::string_view key) {
  QUERN_ASSIGN_OR_RETURN(std::vector<Text> list, TextList(map, key));
  const YamlNode* node = map.Find(key);
  if (node == nullptr || !list.empty()) return list;
  return RecipeError(node->line, absl::StrCat("\"", key, "\" lists no target; write [", kLinear, "] for every linear weight"));
}

absl::StatusOr<bool> ParseBool(const Text& text, absl::string_view key) {
  const std::string lower = absl::AsciiStrToLower(text.value);
  if (lower == "true") return true;
  if (lower == "false") return false;
  return ErrorAt(text.line, absl::StrCat("\"", key, "\" is true or false, not \"", text.value, "\""));
}

absl::Status ApplyGroupSize(const Text& text, quant::SchemeSpec& spec) {
  int64_t size = 0;
  const bool channel = text.value == "channel";
  if (!channel && (!absl::SimpleAtoi(text.value, &size) || size <= 0)) {
    return ErrorAt(text.line, absl::StrCat("group_size is a number of columns or \"channel\", not \"", text.value, "\""));
  }
  if (!TakesGroupSize(spec)) {
    // Formats of floats fix it; saying the same is no mistake.
    if (spec.strategy == quant::Strategy::kChannel ? channel : spec.group_size == size && size > 0) return absl::OkStatus();
    return ErrorAt(text.line, absl::StrCat("group_size fits only integers with one scale a group or a channel, not ", ShortName(spec)));
  }
  spec.strategy = channel ? quant::Strategy::kChannel : quant::Strategy::kGroup;
  spec.group_size = size;
  return absl::OkStatus();
}

absl::Status ApplyObserver(const Text& text, quant::SchemeSpec& spec) {
  const absl::StatusOr<quant::Observer> observer = ParseObserver(text.value);
  if (!observer.ok()) return AnnotateAt(text.line, observer.status());
  spec.observer = *observer;
  return absl::OkStatus();
}

// Members that only say what is so anyway: null, or one of `allowed`. Others are refused as not supported.
absl::Status AllowOnly(const YamlNode& map, absl::string_view key, std::initializer_list<absl::string_view> allowed) {
  const YamlNode* node = map.Find(key);
  if (node == nullptr || node->IsNull()) return absl::OkStatus();
  if ((node->kind == YamlNode::Kind::kMap || node->kind == YamlNode::Kind::kSequence) && node->members.empty() && node->items.empty()) {
    return absl::OkStatus();
  }
  if (node->kind == YamlNode::Kind::kScalar) {
    for (absl::string_view value : allowed) {
      if (node->scalar == value) return absl::OkStatus();
    }
  }
  return RecipeError(node->line, absl::StrCat("this value of \"", key, "\" is not supported; leave it out"));
}

absl::StatusOr<int64_t> ParseNumber(const Text& text, absl::string_view key) {
  int64_t number;
  if (absl::SimpleAtoi(text.value, &number) && number > 0) return number;
  return ErrorAt(text.line, absl::StrCat("\"", key, "\" is a number above 0, not \"", text.value, "\""));
}

// The vocabulary of compressed-tensors' QuantizationArgs.
absl::StatusOr<QuantizationArgs> ParseArgs(const YamlNode& node, absl::string_view where) {
  if (node.kind != YamlNode::Kind::kMap)
    return RecipeError(node.line, absl::StrCat("\"", where, "\" must be a mapping such as {num_bits: 4, group_size: 32}"));
  QUERN_RETURN_IF_ERROR(RefuseUnknownKeys(node, where,
                                          {"num_bits", "type", "strategy", "group_size", "symmetric", "observer", "dynamic", "actorder",
                                           "block_structure", "observer_kwargs", "scale_dtype", "zp_dtype"}));
  for (absl::string_view key : {"actorder", "observer_kwargs"}) QUERN_RETURN_IF_ERROR(AllowOnly(node, key, {}));
  QUERN_RETURN_IF_ERROR(AllowOnly(node, "zp_dtype", {"torch.int8", "torch.float8_e4m3fn", "torch.uint8"}));

  QuantizationArgs args;
  QUERN_ASSIGN_OR_RETURN(const std::optional<Text> bits, OptionalScalar(node, "num_bits"));
  if (!bits.has_value()) return RecipeError(node.line, absl::StrCat("\"", where, "\" needs num_bits"));
  QUERN_ASSIGN_OR_RETURN(const int64_t num_bits, ParseNumber(*bits, "num_bits"));
  if (num_bits > 16) return RecipeError(bits->line, absl::StrCat("num_bits ", num_bits, " is not supported"));
  args.num_bits = static_cast<int>(num_bits);
  QUERN_ASSIGN_OR_RETURN(const std::optional<Text> type, OptionalScalar(node, "type"));
  if (type.has_value()) {
    args.type = absl::AsciiStrToLower(type->value);
    if (args.type != "int" && args.type != "float") {
      return RecipeError(type->line, absl::StrCat("type is int or float, not \"", type->value, "\""));
    }
  }
  QUERN_ASSIGN_OR_RETURN(const std::optional<Text> symmetric, OptionalScalar(node, "symmetric"));
  if (symmetric.has_value()) {
    QUERN_ASSIGN_OR_RETURN(args.symmetric, ParseBool(*symmetric, "symmetric"));
  }
  QUERN_ASSIGN_OR_RETURN(const std::optional<Text> observer, OptionalScalar(node, "observer"));
  if (observer.has_value()) args.observer = observer->value;
  QUERN_ASSIGN_OR_RETURN(const std::optional<Text> scale_dtype, OptionalScalar(node, "scale_dtype"));
  if (scale_dtype.has_value()) args.scale_dtype = scale_dtype->value;
  QUERN_ASSIGN_OR_RETURN(const std::optional<Text> dynamic, OptionalScalar(node, "dynamic"));
  if (dynamic.has_value() && absl::AsciiStrToLower(dynamic->value) == "local") {
    args.dynamic = QuantizationArgs::Dynamic::kLocal;
  } else if (dynamic.has_value()) {
    QUERN_ASSIGN_OR_RETURN(const bool yes, ParseBool(*dynamic, "dynamic"));
    if (yes) args.dynamic = QuantizationArgs::Dynamic::kTrue;
  }
  QUERN_ASSIGN_OR_RETURN(const std::vector<Text> block, TextList(node, "block_structure"));
  if (!block.empty()) {
    if (block.size() != 2) return RecipeError(block[0].line, "block_structure is two numbers: rows and columns");
    QUERN_ASSIGN_OR_RETURN(args.block_rows, ParseNumber(block[0], "block_structure"));
    QUERN_ASSIGN_OR_RETURN(args.block_columns, ParseNumber(block[1], "block_structure"));
  }

  QUERN_ASSIGN_OR_RETURN(const std::optional<Text> strategy, OptionalScalar(node, "strategy"));
  QUERN_ASSIGN_OR_RETURN(std::optional<Text> group_size, OptionalScalar(node, "group_size"));
  const bool channel = group_size.has_value() && (group_size->value == "-1" || group_size->value == "channel");
  args.strategy = strategy.has_value() ? absl::AsciiStrToLower(strategy->value) : channel ? "channel" : group_size ? "group" : "tensor";
  if (channel && args.strategy == "group") args.strategy = "channel";
  if (group_size.has_value() && !(channel && args.strategy == "channel")) {
    QUERN_ASSIGN_OR_RETURN(args.group_size, ParseNumber(*group_size, "group_size"));
  }
  return args;
}

absl::StatusOr<quant::Activations> ParseInputActivations(const YamlNode& map) {
  const YamlNode* node = map.Find("input_activations");
  if (node == nullptr || node->IsNull()) return quant::Activations::kNone;
  QUERN_ASSIGN_OR_RETURN(const QuantizationArgs args, ParseArgs(*node, "input_activations"));
  const absl::StatusOr<quant::Activations> activations = ActivationsOf(args);
  if (!activations.ok()) return RecipeError(node->line, activations.status().message());
  return *activations;
}

// weights and input_activations of `map`, where weights are there.
absl::StatusOr<quant::SchemeSpec> ParseWeights(const YamlNode& map) {
  const YamlNode& node = *map.Find("weights");
  QUERN_ASSIGN_OR_RETURN(const QuantizationArgs args, ParseArgs(node, "weights"));
  absl::StatusOr<quant::SchemeSpec> spec = SpecOf(args);
  if (!spec.ok()) return RecipeError(node.line, absl::StrCat("weights: ", spec.status().message()));
  QUERN_ASSIGN_OR_RETURN(spec->activations, ParseInputActivations(map));
  return *spec;
}

// scheme, weights, input_activations, observer and group_size of `map` into `group`; whether there is a scheme at all.
absl::StatusOr<bool> ParseScheme(const YamlNode& map, GroupDraft& group) {
  QUERN_ASSIGN_OR_RETURN(group.scheme, OptionalScalar(map, "scheme"));
  QUERN_ASSIGN_OR_RETURN(group.group_size, OptionalScalar(map, "group_size"));
  QUERN_ASSIGN_OR_RETURN(group.observer, OptionalScalar(map, "observer"));
  const YamlNode* weights = map.Find("weights");
  const YamlNode* inputs = map.Find("input_activations");
  if (weights != nullptr && !weights->IsNull()) {
    if (group.scheme.has_value()) return RecipeError(weights->line, "give either scheme or weights, not both");
    if (group.group_size.has_value()) return RecipeError(group.group_size->line, "put group_size into weights");
    if (group.observer.has_value()) return RecipeError(group.observer->line, "put observer into weights");
    QUERN_ASSIGN_OR_RETURN(group.weights, ParseWeights(map));
  } else if (inputs != nullptr && !inputs->IsNull()) {
    return RecipeError(inputs->line, "input_activations go with weights; a preset has its own");
  }
  return group.scheme.has_value() || group.weights.has_value();
}

absl::StatusOr<Draft> ParseOwn(const YamlNode& root) {
  QUERN_RETURN_IF_ERROR(RefuseUnknownKeys(root, "the recipe",
                                          {"scheme", "weights", "input_activations", "observer", "group_size", "targets", "ignore",
                                           "groups", "non_divisible", "nonfinite", "numerics"}));
  Draft draft;
  const YamlNode* groups = root.Find("groups");
  if (groups != nullptr && !groups->IsNull()) {
    if (groups->kind != YamlNode::Kind::kSequence) return RecipeError(groups->line, "\"groups\" must be a list");
    for (const YamlNode& item : groups->items) {
      if (item.kind != YamlNode::Kind::kMap)
        return RecipeError(item.line, "a group must be a mapping such as {targets: [attention], scheme: W8A16}");
      QUERN_RETURN_IF_ERROR(
          RefuseUnknownKeys(item, "a group", {"targets", "scheme", "weights", "input_activations", "observer", "group_size"}));
      GroupDraft group;
      group.line = item.line;
      QUERN_ASSIGN_OR_RETURN(group.targets, TargetList(item, "targets"));
      if (group.targets.empty()) return RecipeError(item.line, "a group needs targets");
      QUERN_ASSIGN_OR_RETURN(const bool has_scheme, ParseScheme(item, group));
      if (!has_scheme) return RecipeError(item.line, "a group needs a scheme or weights");
      draft.groups.push_back(std::move(group));
    }
  }
  GroupDraft last;
  last.line = root.line;
  QUERN_ASSIGN_OR_RETURN(last.targets, TargetList(root, "targets"));
  QUERN_ASSIGN_OR_RETURN(const bool has_scheme, ParseScheme(root, last));
  draft.group_size = last.group_size;
  draft.observer = last.observer;
  const bool alone = (last.group_size.has_value() || last.observer.has_value()) && draft.groups.empty();
  if (has_scheme || !last.targets.empty() || alone) draft.last = std::move(last);
  QUERN_ASSIGN_OR_RETURN(draft.ignore, TextList(root, "ignore"));
  QUERN_ASSIGN_OR_RETURN(draft.non_divisible, OptionalScalar(root, "non_divisible"));
  QUERN_ASSIGN_OR_RETURN(draft.nonfinite, OptionalScalar(root, "nonfinite"));
  QUERN_ASSIGN_OR_RETURN(draft.numerics, OptionalScalar(root, "numerics"));
  return draft;
}

// llm-compressor's QuantizationModifier.
absl::StatusOr<Draft> ParseModifier(const YamlNode& node) {
  if (node.kind != YamlNode::Kind::kMap) return RecipeError(node.line, "QuantizationModifier must be a mapping");
  QUERN_RETURN_IF_ERROR(RefuseUnknownKeys(node, "QuantizationModifier",
                                          {"targets", "ignore", "scheme", "config_groups", "kv_cache_scheme", "weight_observer",
                                           "input_observer", "output_observer", "observer", "bypass_divisibility_checks", "index", "group",
                                           "start", "end", "update", "initialized_", "finalized_", "started_", "ended_"}));
  QUERN_RETURN_IF_ERROR(AllowOnly(node, "kv_cache_scheme", {}));
  QUERN_RETURN_IF_ERROR(AllowOnly(node, "input_observer", {"minmax", "static_minmax"}));
  QUERN_RETURN_IF_ERROR(AllowOnly(node, "output_observer", {}));
  QUERN_RETURN_IF_ERROR(AllowOnly(node, "bypass_divisibility_checks", {"false", "False"}));
  Draft draft;
  QUERN_ASSIGN_OR_RETURN(draft.observer, OptionalScalar(node, "weight_observer"));
  if (const YamlNode* observer = node.Find("observer"); observer != nullptr && !observer->IsNull()) {
    if (observer->kind != YamlNode::Kind::kMap) return RecipeError(observer->line, "\"observer\" must be a mapping such as {weights: mse}");
    QUERN_RETURN_IF_ERROR(RefuseUnknownKeys(*observer, "observer", {"weights", "input", "output"}));
    QUERN_RETURN_IF_ERROR(AllowOnly(*observer, "input", {"minmax", "static_minmax"}));
    QUERN_RETURN_IF_ERROR(AllowOnly(*observer, "output", {}));
    if (draft.observer.has_value()) return RecipeError(observer->line, "give either weight_observer or observer, not both");
    QUERN_ASSIGN_OR_RETURN(draft.observer, OptionalScalar(*observer, "weights"));
  }
  QUERN_ASSIGN_OR_RETURN(draft.ignore, TextList(node, "ignore"));
  QUERN_ASSIGN_OR_RETURN(const std::vector<Text> targets, TargetList(node, "targets"));
  const YamlNode* scheme = node.Find("scheme");
  const YamlNode* groups = node.Find("config_groups");
  const bool has_scheme = scheme != nullptr && !scheme->IsNull();
  const bool has_groups = groups != nullptr && !groups->IsNull();
  if (has_scheme && has_groups) return RecipeError(groups->line, "give either scheme or config_groups, not both");
  if (has_scheme && scheme->kind == YamlNode::Kind::kMap) {  // {preset: targets}
    for (const auto& [name, value] : scheme->members) {
      GroupDraft group;
      group.line = value.line;
      group.scheme = Text{name, value.line};
      QUERN_ASSIGN_OR_RETURN(group.targets, TargetList(*scheme, name));
      draft.groups.push_back(std::move(group));
    }
  } else if (has_scheme) {
    GroupDraft group;
    group.line = scheme->line;
    group.targets = targets;
    QUERN_ASSIGN_OR_RETURN(group.scheme, OptionalScalar(node, "scheme"));
    draft.last = std::move(group);
  } else if (has_groups) {
    if (groups->kind != YamlNode::Kind::kMap) return RecipeError(groups->line, "config_groups must be a mapping of groups");
    for (const auto& [name, value] : groups->members) {
      if (value.kind != YamlNode::Kind::kMap) return RecipeError(value.line, absl::StrCat("the group ", name, " must be a mapping"));
      QUERN_RETURN_IF_ERROR(RefuseUnknownKeys(value, absl::StrCat("the group ", name),
                                              {"targets", "weights", "input_activations", "output_activations", "format"}));
      QUERN_RETURN_IF_ERROR(AllowOnly(value, "output_activations", {}));
      GroupDraft group;
      group.line = value.line;
      QUERN_ASSIGN_OR_RETURN(group.targets, TargetList(value, "targets"));
      const YamlNode* weights = value.Find("weights");
      if (weights == nullptr || weights->IsNull()) return RecipeError(value.line, absl::StrCat("the group ", name, " needs weights"));
      QUERN_ASSIGN_OR_RETURN(group.weights, ParseWeights(value));
      if (draft.observer.has_value()) QUERN_RETURN_IF_ERROR(ApplyObserver(*draft.observer, *group.weights));
      QUERN_RETURN_IF_ERROR(AllowOnly(value, "format", {quant::FormatName(*group.weights)}));
      draft.groups.push_back(std::move(group));
    }
  } else {
    return RecipeError(node.line, "QuantizationModifier needs scheme or config_groups");
  }
  for (GroupDraft& group : draft.groups) {
    if (group.targets.empty()) group.targets = targets;
    if (group.targets.empty()) group.targets = {{kLinear, group.line}};
  }
  return draft;
}

// The one QuantizationModifier of a recipe in llm-compressor's form, or nullptr when `root` is not of that form.
absl::StatusOr<const YamlNode*> FindModifier(const YamlNode& root) {
  const YamlNode* found = nullptr;
  std::vector<const YamlNode*> maps;
  const bool staged = std::any_of(root.members.begin(), root.members.end(), [](const auto& member) {
    return absl::EndsWith(member.key, "_stage") || absl::EndsWith(member.key, "_modifiers") || absl::EndsWith(member.key, "Modifier");
  });
  if (!staged) return found;
  maps.push_back(&root);
  while (!maps.empty()) {
    const YamlNode* map = maps.back();
    maps.pop_back();
    for (const auto& [key, value] : map->members) {
      if (absl::EndsWith(key, "_stage") || absl::EndsWith(key, "_modifiers")) {
        if (value.kind != YamlNode::Kind::kMap) return RecipeError(value.line, absl::StrCat("\"", key, "\" must be a mapping"));
        maps.push_back(&value);
      } else if (key == "QuantizationModifier") {
        if (found != nullptr) return RecipeError(value.line, "a second QuantizationModifier; put its groups into the first");
        found = &value;
      } else if (absl::EndsWith(key, "Modifier")) {
        return RecipeError(value.line, absl::StrCat(key, " is not supported: only QuantizationModifier is"));
      } else {
        return RecipeError(value.line, absl::StrCat("unknown key \"", key, "\" in a recipe of llm-compressor"));
      }
    }
  }
  if (found == nullptr) return RecipeError(root.line, "the recipe holds no QuantizationModifier");
  return found;
}

absl::Status ApplyShorthands(const RecipeShorthands& shorthands, Draft& draft) {
  if (!draft.last.has_value() && draft.groups.size() == 1) {
    draft.last = std::move(draft.groups.front());
    draft.groups.clear();
  }
  if (!shorthands.scheme.empty()) {
    if (!draft.last.has_value()) draft.last.emplace();
    draft.last->scheme = Text{shorthands.scheme, 0};
    draft.last->weights.reset();
  }
  if (!shorthands.group_size.empty()) draft.group_size = Text{shorthands.group_size, 0};
  if (!shorthands.observer.empty()) draft.observer = Text{shorthands.observer, 0};
  if (!draft.last.has_value()) {
    if (draft.groups.empty()) {
      return absl::InvalidArgumentError("no scheme: give --scheme NAME or a recipe with scheme, weights or groups");
    }
    if (!shorthands.targets.empty()) {
      return absl::InvalidArgumentError("the recipe has several groups; set targets there, not on the command line");
    }
  } else {
    if (!shorthands.group_size.empty()) draft.last->group_size = draft.group_size;
    if (!shorthands.observer.empty()) {
      draft.last->observer = draft.observer;
      if (draft.last->weights.has_value()) QUERN_RETURN_IF_ERROR(ApplyObserver(*draft.observer, *draft.last->weights));
    }
    if (!shorthands.targets.empty()) {
      draft.last->targets.clear();
      for (const std::string& target : shorthands.targets) draft.last->targets.push_back({target, 0});
    }
    if (draft.last->targets.empty()) draft.last->targets.push_back({kLinear, 0});
    draft.groups.push_back(*std::move(draft.last));
    draft.last.reset();
  }
  for (const std::string& ignore : shorthands.ignore) draft.ignore.push_back({ignore, 0});
  return absl::OkStatus();
}

absl::Status ParsePatterns(const std::vector<Text>& texts, std::vector<Pattern>& patterns) {
  for (const Text& text : texts) {
    absl::StatusOr<Pattern> pattern = Pattern::Parse(text.value);
    if (!pattern.ok()) return AnnotateAt(text.line, pattern.status());
    if (std::none_of(patterns.begin(), patterns.end(), [&](const Pattern& other) { return other.text() == pattern->text(); })) {
      patterns.push_back(*std::move(pattern));
    }
  }
  return absl::OkStatus();
}

std::string Quoted(absl::string_view text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    quoted.push_back(c);
  }
  quoted.push_back('"');
  return quoted;
}

std::string QuotedList(const std::vector<Pattern>& patterns) {
  return absl::StrCat("[", absl::StrJoin(patterns, ", ", [](std::string* out, const Pattern& p) { out->append(Quoted(p.text())); }), "]");
}

std::string GroupSizeText(const quant::SchemeSpec& spec) {
  return spec.strategy == quant::Strategy::kChannel ? "channel" : absl::StrCat(spec.group_size);
}

std::string ArgsText(const QuantizationArgs& args) {
  using Dynamic = QuantizationArgs::Dynamic;
  std::string text = absl::StrCat("{num_bits: ", args.num_bits, ", type: ", args.type, ", strategy: ", args.strategy);
  if (args.group_size.has_value()) absl::StrAppend(&text, ", group_size: ", *args.group_size);
  if (args.block_rows.has_value()) absl::StrAppend(&text, ", block_structure: [", *args.block_rows, ", ", *args.block_columns, "]");
  absl::StrAppend(&text, ", symmetric: ", args.symmetric ? "true" : "false");
  if (args.dynamic != Dynamic::kFalse) absl::StrAppend(&text, ", dynamic: ", args.dynamic == Dynamic::kLocal ? "local" : "true");
  if (!args.observer.empty()) absl::StrAppend(&text, ", observer: ", args.observer);
  if (!args.scale_dtype.empty()) absl::StrAppend(&text, ", scale_dtype: ", args.scale_dtype);
  return text + "}";
}

absl::StatusOr<Recipe> Resolve(const Draft& draft) {
  Recipe recipe;
  quant::Numerics numerics = quant::Numerics::kReference;
  if (draft.numerics.has_value()) {
    if (draft.numerics->value == "precise") {
      numerics = quant::Numerics::kPrecise;
    } else if (draft.numerics->value != "reference") {
      return ErrorAt(draft.numerics->line, absl::StrCat("numerics is reference or precise, not \"", draft.numerics->value, "\""));
    }
  }
  if (draft.non_divisible.has_value()) {
    if (draft.non_divisible->value == "keep") {
      recipe.non_divisible = NonDivisiblePolicy::kKeep;
    } else if (draft.non_divisible->value != "fail") {
      return ErrorAt(draft.non_divisible->line, absl::StrCat("non_divisible is fail or keep, not \"", draft.non_divisible->value, "\""));
    }
  }
  if (draft.nonfinite.has_value()) {
    if (draft.nonfinite->value == "clamp") {
      recipe.nonfinite = NonfinitePolicy::kClamp;
    } else if (draft.nonfinite->value != "fail") {
      return ErrorAt(draft.nonfinite->line, absl::StrCat("nonfinite is fail or clamp, not \"", draft.nonfinite->value, "\""));
    }
  }
  size_t patterns = draft.ignore.size();
  for (const GroupDraft& group : draft.groups) patterns += group.targets.size();
  if (patterns > kMaxPatterns) {
    return absl::InvalidArgumentError(
        absl::StrCat("the recipe has ", patterns, " patterns; at most ", kMaxPatterns, " are allowed: use globs or re:"));
  }
  bool group_size_taken = false;
  for (const GroupDraft& draft_group : draft.groups) {
    RecipeGroup group;
    std::optional<Text> group_size = draft_group.group_size;
    if (draft_group.weights.has_value()) {
      group.scheme = *draft_group.weights;
    } else if (draft_group.scheme.has_value()) {
      absl::StatusOr<quant::SchemeSpec> preset = quant::PresetScheme(draft_group.scheme->value);
      if (!preset.ok()) return AnnotateAt(draft_group.scheme->line, preset.status());
      group.scheme = *std::move(preset);
      const bool in_groups = TakesGroupSize(group.scheme) && group.scheme.strategy == quant::Strategy::kGroup;
      if (!group_size.has_value() && in_groups) group_size = draft.group_size;
      const std::optional<Text>& observer = draft_group.observer.has_value() ? draft_group.observer : draft.observer;
      if (observer.has_value()) QUERN_RETURN_IF_ERROR(ApplyObserver(*observer, group.scheme));
    } else {
      return ErrorAt(draft_group.line, "targets, group_size and observer need a scheme: give scheme or weights");
    }
    if (group_size.has_value()) {
      QUERN_RETURN_IF_ERROR(ApplyGroupSize(*group_size, group.scheme));
      group_size_taken |= draft.group_size.has_value() && group_size->value == draft.group_size->value;
    }
    group.scheme.numerics = numerics;
    QUERN_RETURN_IF_ERROR(AnnotateAt(draft_group.line, quant::CheckSupported(group.scheme)));
    group.scheme_name = PresetOf(group.scheme);
    QUERN_RETURN_IF_ERROR(ParsePatterns(draft_group.targets, group.targets));
    recipe.groups.push_back(std::move(group));
  }
  if (draft.group_size.has_value() && !group_size_taken) {
    return ErrorAt(draft.group_size->line,
                   absl::StrCat("group_size ", draft.group_size->value, " reaches no group: each of the ", draft.groups.size(),
                                " groups has its own or a scheme that takes none; set it there"));
  }
  QUERN_RETURN_IF_ERROR(ParsePatterns(draft.ignore, recipe.ignore));
  return recipe;
}

}  // namespace

struct Pattern::Compiled {
  explicit Compiled(absl::string_view regex, const RE2::Options& options) : re(re2::StringPiece(regex.data(), regex.size()), options) {}
  RE2 re;
  checkpoint::Role role = checkpoint::Role::kOther;
};

absl::StatusOr<Pattern> Pattern::Parse(absl::string_view text) {
  if (text.empty()) return absl::InvalidArgumentError("an empty pattern");
  if (text.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a pattern of ", text.size(), " bytes; at most ", kMaxPatternBytes, " are allowed"));
  }
  for (unsigned char c : text) {
    if (c < 0x20 || c == 0x7f) return absl::InvalidArgumentError("a pattern with a control character, which no module name has");
  }
  Pattern pattern;
  pattern.text_ = std::string(text);
  RE2::Options options;
  options.set_log_errors(false);
  const std::optional<checkpoint::Role> role = checkpoint::ParseRole(text);
  if (role.has_value()) {
    pattern.kind_ = Kind::kRole;
    auto compiled = std::make_shared<Compiled>("", options);
    compiled->role = *role;
    pattern.compiled_ = std::move(compiled);
  } else if (text == kLinear) {
    pattern.kind_ = Kind::kLinear;
  } else if (absl::StartsWith(text, "re:")) {
    pattern.kind_ = Kind::kRegex;
    auto compiled = std::make_shared<Compiled>(text.substr(3), options);
    if (!compiled->re.ok()) {
      const std::string& argument = compiled->re.error_arg();
      if (argument == "(?" || absl::StartsWith(argument, "(?=") || absl::StartsWith(argument, "(?!") || absl::StartsWith(argument, "(?<")) {
        return absl::InvalidArgumentError(
            absl::StrCat("\"", text, "\": lookaround (", argument,
                         ") is not supported. Write two plain patterns instead: what is wanted under targets, "
                         "and what the lookaround keeps out under ignore; for example \"re:.*mlp(?!.*gate)\" is targets [\"re:.*mlp\"] "
                         "with ignore [\"re:.*mlp.*gate\"]"));
      }
      return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is no regular expression that RE2 accepts: ", compiled->re.error()));
    }
    pattern.compiled_ = std::move(compiled);
  } else if (absl::StrContains(text, "*") || absl::StrContains(text, "?")) {
    pattern.kind_ = Kind::kGlob;
  }
  return pattern;
}

bool Pattern::Matches(absl::string_view module, checkpoint::Role role, bool linear) const {
  switch (kind_) {
    case Kind::kRole:
      return role == compiled_->role;
    case Kind::kLinear:
      return linear;
    case Kind::kExact:
      return module == text_;
    case Kind::kGlob:
      return GlobMatches(text_, module);
    case Kind::kRegex:
      return compiled_->re.Match(re2::StringPiece(module.data(), module.size()), 0, module.size(), RE2::ANCHOR_START, nullptr, 0);
  }
  return false;
}

std::string Recipe::ToYaml() const {
  std::string yaml = "groups:\n";
  for (const RecipeGroup& group : groups) {
    const quant::SchemeSpec& spec = group.scheme;
    absl::StrAppend(&yaml, "  - targets: ", QuotedList(group.targets), "\n");
    const std::string preset = PresetOf(spec);
    if (!preset.empty()) {
      absl::StrAppend(&yaml, "    scheme: ", preset, "\n");
      if (TakesGroupSize(spec)) absl::StrAppend(&yaml, "    group_size: ", GroupSizeText(spec), "\n");
      if (spec.observer != quant::Observer::kMinMax) absl::StrAppend(&yaml, "    observer: ", ObserverName(spec.observer), "\n");
      continue;
    }
    // Schemes of a recipe are those of compressed-tensors, which all have args.
    absl::StrAppend(&yaml, "    weights: ", ArgsText(WeightArgs(spec).value_or(QuantizationArgs())), "\n");
    const std::optional<QuantizationArgs> inputs = InputArgs(spec.activations);
    if (inputs.has_value()) absl::StrAppend(&yaml, "    input_activations: ", ArgsText(*inputs), "\n");
  }
  absl::StrAppend(&yaml, "ignore: ", QuotedList(ignore), "\n");
  absl::StrAppend(&yaml, "non_divisible: ", non_divisible == NonDivisiblePolicy::kFail ? "fail" : "keep", "\n");
  absl::StrAppend(&yaml, "nonfinite: ", nonfinite == NonfinitePolicy::kFail ? "fail" : "clamp", "\n");
  const bool precise = !groups.empty() && groups.front().scheme.numerics == quant::Numerics::kPrecise;
  absl::StrAppend(&yaml, "numerics: ", precise ? "precise" : "reference", "\n");
  return yaml;
}

absl::StatusOr<Recipe> ParseRecipe(absl::string_view yaml, const RecipeShorthands& shorthands) {
  QUERN_ASSIGN_OR_RETURN(const YamlNode root, ParseYaml(yaml));
  Draft draft;
  if (root.kind == YamlNode::Kind::kMap) {
    QUERN_ASSIGN_OR_RETURN(const YamlNode* const modifier, FindModifier(root));
    QUERN_ASSIGN_OR_RETURN(draft, modifier != nullptr ? ParseModifier(*modifier) : ParseOwn(root));
  } else if (!root.IsNull()) {
    return RecipeError(root.line, "a recipe is a mapping such as \"scheme: W4A16\"");
  }
  QUERN_RETURN_IF_ERROR(ApplyShorthands(shorthands, draft));
  return Resolve(draft);
}

}  // namespace quern::daemon
