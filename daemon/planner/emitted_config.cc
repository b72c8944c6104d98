#include "daemon/planner/emitted_config.h"

#include <re2/re2.h>
#include <re2/set.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "daemon/planner/module_names.h"
#include "daemon/planner/scheme_config.h"

namespace quern::daemon {
namespace {

using Json = nlohmann::json;

constexpr int64_t kRegexMemory = int64_t{256} << 20;

// A module's name, or the one that transformers gives it.
struct Name {
  std::string text;
  int scheme;
  bool expert;  // numbers behind the layer's are those of experts, of which all are alike
};

// A name cut at its first number: "model.layers" "3" "mlp.experts.17.up_proj".
struct Parts {
  absl::string_view before;
  absl::string_view number;
  absl::string_view after;
};

std::optional<Parts> Cut(absl::string_view name) {
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    if (IsNumber(name.substr(begin, end - begin))) {
      if (begin == 0 || end + 1 >= name.size()) return std::nullopt;
      return Parts{name.substr(0, begin - 1), name.substr(begin, end - begin), name.substr(end + 1)};
    }
    begin = end + 1;
  }
  return std::nullopt;
}

// A regex for the dotted text. Numbers become \d+ where `wild`. transformers takes a pattern with the word "experts" for that of the routed
// experts: in others the word is spelled so that the text does not contain it.
std::string Escape(absl::string_view dotted, bool wild, bool routed) {
  std::vector<std::string> parts;
  for (absl::string_view component : absl::StrSplit(dotted, '.')) {
    if (wild && IsNumber(component)) {
      parts.push_back("\\d+");
      continue;
    }
    std::string escaped;
    for (char c : component) {
      // Letters, digits, '_' and bytes beyond ASCII stand for themselves, also '-' outside of brackets.
      const bool plain =
          (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || (c & 0x80) != 0;
      if (!plain) escaped.push_back('\\');
      escaped.push_back(c);
    }
    if (!routed) escaped = absl::StrReplaceAll(escaped, {{"experts", "expert[s]"}});
    parts.push_back(std::move(escaped));
  }
  return absl::StrJoin(parts, "\\.");
}

// The entry for one name: the name itself where readers take it for nothing else. A text that begins with "re:" is a regex to them, and one
// component can be the name of a class of modules, of which a target may be any part in vLLM, whatever the case; no class has a '_'.
std::string ExactEntry(const Name& name, bool target) {
  const bool capitals = std::any_of(name.text.begin(), name.text.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
  const bool no_class = absl::StrContains(name.text, ".") || (!capitals && (absl::StrContains(name.text, "_") || !target));
  if (no_class && !name.text.empty() && !absl::StartsWith(name.text, "re:")) return name.text;
  return absl::StrCat("re:^", Escape(name.text, false, name.expert), "$");
}

// "re:<head><leaf>$", with several leaves as alternatives.
std::string TargetText(absl::string_view head, const std::set<std::string>& leaves) {
  return absl::StrCat("re:", head, leaves.size() == 1 ? *leaves.begin() : absl::StrCat("(", absl::StrJoin(leaves, "|"), ")"), "$");
}

// How narrow a pattern is made, from the widest on.
enum class Width { kAnywhere, kLayers, kLayersOfPrefix };
constexpr Width kWidths[] = {Width::kAnywhere, Width::kLayers, Width::kLayersOfPrefix};

// Targets of all schemes. Tries wide patterns first; those that match a name which is not theirs are made narrower for the names that need
// it.
class TargetFinder {
 public:
  TargetFinder(const std::vector<Name>& names, size_t schemes) : names_(names), targets_(schemes) {}

  absl::StatusOr<std::vector<std::vector<std::string>>> Run() {
    std::vector<size_t> open;
    for (size_t i = 0; i < names_.size(); ++i) {
      if (names_[i].scheme >= 0) open.push_back(i);
    }
    for (Width width : kWidths) {
      if (open.empty()) break;
      QUERN_ASSIGN_OR_RETURN(open, Try(width, open));
    }
    for (size_t i : open) targets_[names_[i].scheme].push_back({NaturalKey(names_[i].text), ExactEntry(names_[i], /*target=*/true)});
    std::vector<std::vector<std::string>> texts(targets_.size());
    for (size_t s = 0; s < targets_.size(); ++s) {
      std::sort(targets_[s].begin(), targets_[s].end());
      for (auto& [key, text] : targets_[s]) texts[s].push_back(std::move(text));
    }
    return texts;
  }

 private:
  // Names that one pattern stands for: <before>.<one of the layers>.<after>.
  struct Bundle {
    int scheme = -1;
    std::string before;  // as regex; empty: anything
    std::set<uint64_t> layers;
    std::string after;  // as regex, up to the last component
    std::string leaf;   // as regex
    std::vector<size_t> names;

    std::string Head() const {
      if (before.empty()) return absl::StrCat(".*\\.", after);
      const std::string number = absl::StrJoin(layers, "|");
      return absl::StrCat(".*", before, "\\.", layers.size() == 1 ? number : absl::StrCat("(", number, ")"), "\\.", after);
    }
  };

  // The names for which no pattern of this width would do.
  absl::StatusOr<std::vector<size_t>> Try(Width width, const std::vector<size_t>& open) {
    std::map<std::string, Bundle> bundles;
    std::vector<size_t> left;
    for (size_t i : open) {
      const Name& name = names_[i];
      const std::optional<Parts> parts = Cut(name.text);
      if (!parts.has_value()) {
        left.push_back(i);
        continue;
      }
      absl::string_view before = parts->before;
      if (width == Width::kAnywhere) before = "";
      if (width == Width::kLayers && absl::StrContains(before, ".")) before = before.substr(before.rfind('.') + 1);
      const std::string after = name.expert ? NameTemplate(parts->after) : std::string(parts->after);
      Bundle& bundle = bundles[absl::StrCat(name.scheme, "\n", before, "\n", after, "\n", name.expert)];
      if (bundle.names.empty()) {
        const size_t dot = parts->after.rfind('.');
        bundle.scheme = name.scheme;
        bundle.before = Escape(before, false, name.expert);
        if (dot != absl::string_view::npos) {
          bundle.after = absl::StrCat(Escape(parts->after.substr(0, dot), name.expert, name.expert), "\\.");
        }
        bundle.leaf = Escape(dot == absl::string_view::npos ? parts->after : parts->after.substr(dot + 1), false, name.expert);
      }
      uint64_t layer = 0;
      for (char c : parts->number) layer = layer * 10 + static_cast<uint64_t>(c - '0');
      bundle.layers.insert(layer);
      bundle.names.push_back(i);
    }
    std::vector<const Bundle*> order;
    std::vector<std::string> patterns;
    for (const auto& [key, bundle] : bundles) {
      order.push_back(&bundle);
      patterns.push_back(absl::StrCat(bundle.Head(), bundle.leaf, "$"));
    }
    QUERN_ASSIGN_OR_RETURN(const std::vector<bool> wrong, MatchOthers(patterns, order));

    std::map<std::pair<int, std::string>, std::set<std::string>> leaves;
    for (size_t b = 0; b < order.size(); ++b) {
      if (wrong[b]) {
        left.insert(left.end(), order[b]->names.begin(), order[b]->names.end());
      } else {
        leaves[{order[b]->scheme, order[b]->Head()}].insert(order[b]->leaf);
      }
    }
    for (auto& [key, set] : leaves) {
      // vLLM before 0.33 looks these up by the names that other families have.
      if (absl::StrContains(key.second, "experts\\.\\d+\\.") && set.count("w1") + set.count("w2") + set.count("w3") == set.size()) {
        set.insert({"gate_proj", "up_proj", "down_proj"});
      }
      const std::string text = TargetText(key.second, set);
      targets_[key.first].push_back({text, text});
    }
    std::sort(left.begin(), left.end());
    return left;
  }

  // For each pattern whether it matches a name that is not of its scheme.
  absl::StatusOr<std::vector<bool>> MatchOthers(const std::vector<std::string>& patterns, const std::vector<const Bundle*>& bundles) const {
    std::vector<bool> wrong(patterns.size(), false);
    RE2::Options options;
    options.set_log_errors(false);
    options.set_max_mem(kRegexMemory);
    RE2::Set set(options, RE2::ANCHOR_START);
    for (const std::string& pattern : patterns) {
      std::string error;
      if (set.Add(pattern, &error) < 0) return absl::InternalError(absl::StrCat("pattern ", pattern, ": ", error));
    }
    if (patterns.empty()) return wrong;
    if (!set.Compile()) return absl::InternalError(absl::StrCat(patterns.size(), " patterns do not compile"));
    std::vector<int> matched;
    for (const Name& name : names_) {
      matched.clear();
      RE2::Set::ErrorInfo error;
      if (!set.Match(name.text, &matched, &error)) {
        if (error.kind != RE2::Set::kNoError) return absl::InternalError("patterns take too much memory to match");
        continue;
      }
      for (int m : matched) {
        if (bundles[m]->scheme != name.scheme) wrong[m] = true;
      }
    }
    return wrong;
  }

  const std::vector<Name>& names_;
  std::vector<std::vector<std::pair<std::string, std::string>>> targets_;  // of schemes: (order, text)
};

std::vector<Name> AllNames(const std::vector<ConfigModule>& modules) {
  std::vector<Name> names;
  for (const ConfigModule& module : modules) {
    names.push_back({module.name, module.scheme, module.expert});
    if (!module.transformers_name.empty()) names.push_back({module.transformers_name, module.scheme, module.expert});
  }
  return names;
}

// One entry of targets or ignore: "re:" and a regex anchored at the start, else the exact name.
class Entry {
 public:
  explicit Entry(const std::string& text) : text_(text) {
    if (!absl::StartsWith(text, "re:")) return;
    RE2::Options options;
    options.set_log_errors(false);
    regex_ = std::make_unique<RE2>(text.substr(3), options);
  }
  bool valid() const { return regex_ == nullptr || regex_->ok(); }
  bool Matches(const std::string& name) const {
    return regex_ == nullptr ? name == text_ : regex_->Match(name, 0, name.size(), RE2::ANCHOR_START, nullptr, 0);
  }

 private:
  std::string text_;
  std::unique_ptr<RE2> regex_;
};

// Exact names are looked up, patterns are tried.
class EntryList {
 public:
  absl::Status Add(const Json& list) {
    for (const Json& item : list) {
      const std::string text = item.get<std::string>();
      if (!absl::StartsWith(text, "re:")) {
        exact_.insert(text);
        continue;
      }
      patterns_.push_back(std::make_unique<Entry>(text));
      if (!patterns_.back()->valid()) return absl::InvalidArgumentError(absl::StrCat("quantization_config holds a bad pattern ", text));
    }
    return absl::OkStatus();
  }
  bool Matches(const std::string& name) const {
    if (exact_.contains(name)) return true;
    return std::any_of(patterns_.begin(), patterns_.end(), [&](const auto& entry) { return entry->Matches(name); });
  }

 private:
  absl::flat_hash_set<std::string> exact_;
  std::vector<std::unique_ptr<Entry>> patterns_;
};

}  // namespace

absl::StatusOr<std::string> BuildQuantizationConfig(const std::vector<quant::SchemeSpec>& schemes,
                                                    const std::vector<ConfigModule>& modules) {
  const std::vector<Name> names = AllNames(modules);
  QUERN_ASSIGN_OR_RETURN(const std::vector<std::vector<std::string>> targets, TargetFinder(names, schemes.size()).Run());
  Json groups = Json::object();
  for (size_t s = 0; s < schemes.size(); ++s) {
    QUERN_ASSIGN_OR_RETURN(Json group, GroupConfig(schemes[s]));
    group["targets"] = targets[s];
    groups[absl::StrCat("group_", s)] = std::move(group);
  }
  std::set<std::pair<std::string, std::string>> ignore;
  for (const Name& name : names) {
    if (name.scheme < 0) ignore.insert({NaturalKey(name.text), ExactEntry(name, /*target=*/false)});
  }
  Json ignored = Json::array();
  for (const auto& [key, text] : ignore) ignored.push_back(text);
  const Json config = {{"config_groups", std::move(groups)},  {"format", ConfigFormat(schemes)},    {"global_compression_ratio", nullptr},
                       {"ignore", std::move(ignored)},        {"kv_cache_scheme", nullptr},         {"quant_method", "compressed-tensors"},
                       {"quantization_status", "compressed"}, {"transform_config", Json::object()}, {"version", kCompressedTensorsVersion}};
  try {
    return config.dump(2, ' ', /*ensure_ascii=*/true);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("a module's name is no valid UTF-8: ", error.what()));
  }
}

absl::StatusOr<std::vector<std::string>> CheckQuantizationConfig(absl::string_view quantization_config,
                                                                 const std::vector<quant::SchemeSpec>& schemes,
                                                                 const std::vector<ConfigModule>& modules, size_t limit) {
  std::vector<Json> expected;
  for (const quant::SchemeSpec& scheme : schemes) {
    QUERN_ASSIGN_OR_RETURN(expected.emplace_back(), GroupConfig(scheme));
  }
  std::vector<std::string> differences;
  try {
    const Json config = Json::parse(quantization_config.begin(), quantization_config.end());
    if (config.at("quant_method") != "compressed-tensors") differences.push_back("quant_method is not compressed-tensors");
    if (config.at("format") != ConfigFormat(schemes)) {
      differences.push_back(
          absl::StrCat("format of quantization_config is ", config.at("format").dump(), ", the modules are ", ConfigFormat(schemes)));
    }
    // What else stands there could say that the tensors are something else.
    static const auto* const kKeys = new std::set<std::string>{
        "config_groups",       "format",          "global_compression_ratio", "ignore", "kv_cache_scheme", "quant_method",
        "quantization_status", "sparsity_config", "transform_config",         "version"};
    for (const auto& [key, value] : config.items()) {
      if (kKeys->count(key) == 0) differences.push_back(absl::StrCat("quantization_config has ", key, ", which Quern does not write"));
    }
    EntryList ignore;
    QUERN_RETURN_IF_ERROR(ignore.Add(config.at("ignore")));
    struct Group {
      std::string name;
      EntryList targets;
      Json scheme;  // without targets
    };
    std::vector<Group> groups;
    for (const auto& [name, group] : config.at("config_groups").items()) {
      groups.emplace_back();
      groups.back().name = name;
      groups.back().scheme = group;
      groups.back().scheme.erase("targets");
      QUERN_RETURN_IF_ERROR(groups.back().targets.Add(group.at("targets")));
    }
    for (const Name& name : AllNames(modules)) {
      if (differences.size() >= limit) break;
      const Group* found = nullptr;
      if (!ignore.Matches(name.text)) {
        const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.targets.Matches(name.text); });
        if (group != groups.end()) found = &*group;
      }
      if (found == nullptr && name.scheme >= 0) {
        differences.push_back(absl::StrCat(name.text, " is quantized, but no group of quantization_config targets it"));
      } else if (found != nullptr && name.scheme < 0) {
        differences.push_back(absl::StrCat(name.text, " is not quantized, but ", found->name, " of quantization_config targets it"));
      } else if (found != nullptr && found->scheme != expected[name.scheme]) {
        differences.push_back(absl::StrCat(name.text, " is ", schemes[name.scheme].ToString(), ", but ", found->name,
                                           " of quantization_config says otherwise"));
      }
    }
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("quantization_config: ", error.what()));
  }
  return differences;
}

}  // namespace quern::daemon
