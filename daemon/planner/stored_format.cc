#include "daemon/planner/stored_format.h"

#include <re2/re2.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace quern::daemon {

using Json = nlohmann::json;

// One entry of config_groups, where its weights are integers, or FP8 in blocks.
struct StoredFormat::Group {
  std::vector<std::string> names;  // exact names of modules
  std::vector<std::unique_ptr<RE2>> patterns;
  bool everything = false;              // targets a class of modules
  quant::SchemeSpec spec;               // of integers
  std::pair<int64_t, int64_t> block{};  // of FP8

  bool Matches(const std::string& name) const {
    if (name.empty()) return false;
    for (const std::string& exact : names) {
      if (exact == name) return true;
    }
    for (const auto& pattern : patterns) {
      if (pattern->Match(name, 0, name.size(), RE2::ANCHOR_START, nullptr, 0)) return true;
    }
    return false;
  }
};

namespace {

constexpr int64_t kLargestGroup = int64_t{1} << 16;  // as quant::CheckSupported has it
constexpr int64_t kLargestSide = int64_t{1} << 32;   // of a block
constexpr size_t kShownBytes = 60;

// A value as it may be shown: what stands in a foreign file can be of any length.
std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kShownBytes) text = absl::StrCat(text.substr(0, kShownBytes), "...");
  return text;
}

// Reads members of one object of the config. A member that is not there or null is nullopt; one that is no such value is INVALID_ARGUMENT
// with its place, its key and what was found. Nothing is converted: a fraction, a text or true is no integer. Borrows the object.
class Members {
 public:
  // `place` begins with the file.
  Members(const Json& object, std::string place) : object_(object), place_(std::move(place)) {}

  const std::string& place() const { return place_; }
  const Json* Find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  absl::Status Error(absl::string_view why) const { return absl::InvalidArgumentError(absl::StrCat(place_, ": ", why)); }
  absl::Status Wrong(const char* key, absl::string_view wanted) const {
    const auto found = object_.find(key);
    if (found == object_.end()) return Error(absl::StrCat(key, " is missing; it must be ", wanted));
    return Error(absl::StrCat(key, " is ", Shown(*found), "; it must be ", wanted));
  }

  absl::StatusOr<std::optional<int64_t>> Integer(const char* key, int64_t least, int64_t largest) const {
    const Json* const value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!IsInteger(*value, least, largest)) return Wrong(key, absl::StrCat("an integer from ", least, " to ", largest));
    return value->get<int64_t>();
  }
  absl::StatusOr<std::optional<bool>> Bool(const char* key) const {
    const Json* const value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) return Wrong(key, "true or false");
    return value->get<bool>();
  }
  // In lower case, as its readers take it.
  absl::StatusOr<std::optional<std::string>> Word(const char* key) const {
    const Json* const value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) return Wrong(key, "a text");
    return absl::AsciiStrToLower(value->get<std::string>());
  }
  // Null when it is not there.
  absl::StatusOr<const Json*> Object(const char* key) const {
    const Json* const value = Find(key);
    if (value != nullptr && !value->is_object()) return Wrong(key, "an object");
    return value;
  }
  absl::StatusOr<const Json*> List(const char* key) const {
    const Json* const value = Find(key);
    if (value != nullptr && !value->is_array()) return Wrong(key, "a list");
    return value;
  }
  // Rows and columns of a block: [128, 128], or "128x128" as early versions wrote.
  absl::StatusOr<std::optional<std::pair<int64_t, int64_t>>> Block(const char* key) const {
    const Json* const value = Find(key);
    if (value == nullptr) return std::nullopt;
    int64_t sides[2] = {0, 0};
    if (value->is_string()) {
      const std::vector<std::string> parts = absl::StrSplit(value->get<std::string>(), 'x');
      for (size_t i = 0; parts.size() == 2 && i < 2; ++i) {
        if (!absl::SimpleAtoi(parts[i], &sides[i])) sides[i] = 0;
      }
    } else if (value->is_array() && value->size() == 2) {
      for (size_t i = 0; i < 2; ++i) {
        if (IsInteger((*value)[i], 1, kLargestSide)) sides[i] = (*value)[i].get<int64_t>();
      }
    }
    for (const int64_t side : sides) {
      if (side < 1 || side > kLargestSide) return Wrong(key, "two integers above 0, rows and columns");
    }
    return std::pair(sides[0], sides[1]);
  }

 private:
  static bool IsInteger(const Json& value, int64_t least, int64_t largest) {
    if (!value.is_number_integer()) return false;
    if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return false;
    const int64_t number = value.get<int64_t>();
    return number >= least && number <= largest;
  }

  const Json& object_;
  std::string place_;
};

absl::StatusOr<quant::SchemeSpec> IntegerSpec(const Members& weights) {
  quant::SchemeSpec spec;
  QUERN_ASSIGN_OR_RETURN(const std::optional<int64_t> bits, weights.Integer("num_bits", 2, 8));
  if (!bits.has_value()) return weights.Wrong("num_bits", "an integer from 2 to 8");
  spec.num_bits = static_cast<int>(*bits);
  QUERN_ASSIGN_OR_RETURN(const std::optional<bool> symmetric, weights.Bool("symmetric"));
  spec.symmetric = symmetric.value_or(true);
  // -1 is that of a channel.
  QUERN_ASSIGN_OR_RETURN(const std::optional<int64_t> size, weights.Integer("group_size", -1, kLargestGroup));
  QUERN_ASSIGN_OR_RETURN(std::optional<std::string> strategy, weights.Word("strategy"));
  // Left out by early versions.
  if (!strategy.has_value()) strategy = !size.has_value() ? "tensor" : *size < 0 ? "channel" : "group";
  spec.group_size = 0;
  if (*strategy == "group") {
    if (size.value_or(0) < 1) {
      return weights.Wrong("group_size", absl::StrCat("an integer from 1 to ", kLargestGroup, ", since its scales are those of groups"));
    }
    spec.strategy = quant::Strategy::kGroup;
    spec.group_size = *size;
  } else if (*strategy == "channel") {
    spec.strategy = quant::Strategy::kChannel;
  } else if (*strategy == "tensor") {
    spec.strategy = quant::Strategy::kTensor;
  } else {
    return weights.Wrong("strategy", "group, channel or tensor, which are those of integers");
  }
  return spec;
}

// Python writes a bare Infinity or NaN, which is no JSON: these become null.
std::string WithoutPythonNumbers(absl::string_view text) {
  std::string json;
  json.reserve(text.size());
  bool quoted = false;
  while (!text.empty()) {
    size_t taken = 1;
    if (text[0] == '"') {
      quoted = !quoted;
    } else if (quoted && text[0] == '\\' && text.size() > 1) {
      taken = 2;
    } else if (!quoted &&
               (absl::ConsumePrefix(&text, "-Infinity") || absl::ConsumePrefix(&text, "Infinity") || absl::ConsumePrefix(&text, "NaN"))) {
      json.append("null");
      continue;
    }
    json.append(text.data(), taken);
    text.remove_prefix(taken);
  }
  return json;
}

bool IsKnownFormat(absl::string_view name) {
  static constexpr absl::string_view kFormats[] = {"dense",           "pack-quantized",       "int-quantized",        "float-quantized",
                                                   "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
                                                   "mixed-precision"};
  return std::find(std::begin(kFormats), std::end(kFormats), name) != std::end(kFormats);
}

// Of the config, or of one of its groups.
absl::Status CheckFormat(const Members& members, absl::string_view method) {
  QUERN_ASSIGN_OR_RETURN(const std::optional<std::string> format, members.Word("format"));
  if (method != "compressed-tensors" || !format.has_value() || format->empty() || IsKnownFormat(*format)) return absl::OkStatus();
  return members.Error(absl::StrCat("the format ", Shown(*format), " cannot be read"));
}

}  // namespace

absl::StatusOr<StoredFormat> StoredFormat::Parse(const checkpoint::ModelConfig& config) {
  StoredFormat format;
  if (config.quantization_config.empty()) return format;
  const std::string file = "config.json: quantization_config";
  try {
    const Json json = Json::parse(WithoutPythonNumbers(config.quantization_config));
    if (!json.is_object()) return absl::InvalidArgumentError(absl::StrCat(file, " is ", Shown(json), "; it must be an object"));
    const Members root(json, file);
    QUERN_ASSIGN_OR_RETURN(const std::optional<std::string> method, root.Word("quant_method"));
    format.method_ = method.value_or("");
    // Weights that were rotated, or stored in a sparse or another form, are not what their tensors alone say.
    for (const char* key : {"transform_config", "sparsity_config"}) {
      QUERN_ASSIGN_OR_RETURN(const Json* const changed, root.Object(key));
      if (changed == nullptr || changed->empty()) continue;
      QUERN_ASSIGN_OR_RETURN(const std::optional<std::string> form, Members(*changed, absl::StrCat(file, ": ", key)).Word("format"));
      if (form == "dense") continue;
      return root.Error(
          absl::StrCat("its ", key, " changes what the weights mean, and cannot be undone here; take a checkpoint without it"));
    }
    QUERN_RETURN_IF_ERROR(CheckFormat(root, format.method_));
    QUERN_ASSIGN_OR_RETURN(format.block_, root.Block("weight_block_size"));
    QUERN_ASSIGN_OR_RETURN(const Json* const groups, root.Object("config_groups"));
    if (groups == nullptr) return format;
    for (const auto& [name, value] : groups->items()) {
      if (value.is_array()) continue;  // targets of a preset, which says nothing of how it was stored
      const Members group(value, absl::StrCat(file, ": config_groups: ", Shown(Json(name))));
      if (!value.is_object())
        return absl::InvalidArgumentError(absl::StrCat(group.place(), " is ", Shown(value), "; it must be an object"));
      QUERN_ASSIGN_OR_RETURN(const Json* const args, group.Object("weights"));
      if (args == nullptr) continue;
      QUERN_RETURN_IF_ERROR(CheckFormat(group, format.method_));
      const Members weights(*args, absl::StrCat(group.place(), ": weights"));
      QUERN_ASSIGN_OR_RETURN(const std::optional<std::string> type, weights.Word("type"));
      const bool integers = type.value_or("int") == "int";
      QUERN_ASSIGN_OR_RETURN(const auto block, weights.Block("block_structure"));
      if (!integers && !block.has_value()) continue;
      auto entry = std::make_shared<Group>();
      if (integers) {
        QUERN_ASSIGN_OR_RETURN(entry->spec, IntegerSpec(weights));
      } else {
        entry->block = *block;
      }
      QUERN_ASSIGN_OR_RETURN(const Json* const targets, group.List("targets"));
      entry->everything = targets == nullptr;
      for (const Json& target : targets == nullptr ? Json::array() : *targets) {
        if (!target.is_string()) return group.Error(absl::StrCat("targets: ", Shown(target), " is no text"));
        const std::string text = target.get<std::string>();
        if (!absl::StartsWith(text, "re:")) {
          // Names of classes have no dots and begin with a capital.
          if (!text.empty() && absl::ascii_isupper(static_cast<unsigned char>(text[0])) && !absl::StrContains(text, ".")) {
            entry->everything = true;
          } else {
            entry->names.push_back(text);
          }
          continue;
        }
        RE2::Options options;
        options.set_log_errors(false);
        auto pattern = std::make_unique<RE2>(text.substr(3), options);
        if (!pattern->ok()) return group.Error(absl::StrCat("targets: ", Shown(target), " is no pattern that RE2 knows"));
        entry->patterns.push_back(std::move(pattern));
      }
      (integers ? format.groups_ : format.blocks_).push_back(std::move(entry));
    }
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", error.what()));
  }
  return format;
}

const StoredFormat::Group* StoredFormat::Find(const std::vector<std::shared_ptr<const Group>>& groups,
                                              const checkpoint::ModuleIdentity& module) {
  for (const auto& group : groups) {
    if (group->Matches(module.module) || group->Matches(module.transformers_name)) return group.get();
  }
  for (const auto& group : groups) {
    if (group->everything || groups.size() == 1) return group.get();
  }
  return nullptr;
}

const quant::SchemeSpec* StoredFormat::IntegersOf(const checkpoint::ModuleIdentity& module) const {
  const Group* const group = Find(groups_, module);
  return group == nullptr ? nullptr : &group->spec;
}

std::optional<std::pair<int64_t, int64_t>> StoredFormat::BlockOf(const checkpoint::ModuleIdentity& module) const {
  if (block_.has_value()) return block_;
  const Group* const group = Find(blocks_, module);
  return group == nullptr ? std::nullopt : std::optional(group->block);
}

}  // namespace quern::daemon
