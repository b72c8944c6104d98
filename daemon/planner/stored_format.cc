#include "daemon/planner/stored_format.h"

#include <re2/re2.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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

absl::StatusOr<quant::SchemeSpec> IntegerSpec(const Json& weights) {
  quant::SchemeSpec spec;
  spec.num_bits = weights.at("num_bits").get<int>();
  spec.symmetric = weights.value("symmetric", true);
  const Json size = weights.contains("group_size") ? weights["group_size"] : Json();
  spec.group_size = size.is_number_integer() ? size.get<int64_t>() : 0;
  const Json strategy = weights.contains("strategy") ? weights["strategy"] : Json();
  std::string name;
  if (strategy.is_string()) {
    name = strategy.get<std::string>();
  } else {
    // Left out by early versions.
    name = spec.group_size > 0 ? "group" : spec.group_size < 0 ? "channel" : "tensor";
  }
  if (name == "group") {
    spec.strategy = quant::Strategy::kGroup;
    if (spec.group_size <= 0) return absl::InvalidArgumentError("the strategy group needs a group_size");
    return spec;
  }
  spec.group_size = 0;
  if (name == "channel") {
    spec.strategy = quant::Strategy::kChannel;
  } else if (name == "tensor") {
    spec.strategy = quant::Strategy::kTensor;
  } else {
    return absl::InvalidArgumentError(absl::StrCat("integers with the strategy ", name, " are not known"));
  }
  return spec;
}

// Two numbers, or nothing.
std::optional<std::pair<int64_t, int64_t>> Block(const Json& json, const char* key) {
  if (!json.contains(key) || !json[key].is_array() || json[key].size() != 2) return std::nullopt;
  if (!json[key][0].is_number_integer() || !json[key][1].is_number_integer()) return std::nullopt;
  return std::pair(json[key][0].get<int64_t>(), json[key][1].get<int64_t>());
}

bool IsKnownFormat(absl::string_view name) {
  static constexpr absl::string_view kFormats[] = {"dense",           "pack-quantized",       "int-quantized",        "float-quantized",
                                                   "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
                                                   "mixed-precision"};
  return std::find(std::begin(kFormats), std::end(kFormats), name) != std::end(kFormats);
}

}  // namespace

absl::StatusOr<StoredFormat> StoredFormat::Parse(const checkpoint::ModelConfig& config) {
  StoredFormat format;
  if (config.quantization_config.empty()) return format;
  const auto invalid = [](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: quantization_config: ", why));
  };
  try {
    const Json json = Json::parse(config.quantization_config, nullptr, /*allow_exceptions=*/false);
    // Python writes a bare Infinity, which is no JSON: then the tensors must speak for themselves.
    if (json.is_discarded()) return format;
    if (!json.is_object()) return invalid("not an object");
    if (json.contains("quant_method") && json["quant_method"].is_string()) {
      format.method_ = absl::AsciiStrToLower(json["quant_method"].get<std::string>());
    }
    // Weights that were rotated, or stored in a sparse or another form, are not what their tensors alone say.
    for (const char* key : {"transform_config", "sparsity_config"}) {
      if (!json.contains(key) || !json[key].is_object() || json[key].empty()) continue;
      if (json[key].value("format", "") == "dense") continue;
      return invalid(absl::StrCat("its ", key, " changes what the weights mean, and cannot be undone here; take a checkpoint without it"));
    }
    const std::string stored = json.contains("format") && json["format"].is_string() ? json["format"].get<std::string>() : "";
    if (format.method_ == "compressed-tensors" && !stored.empty() && !IsKnownFormat(stored)) {
      return invalid(absl::StrCat("the format \"", stored, "\" cannot be read"));
    }
    format.block_ = Block(json, "weight_block_size");
    if (!json.contains("config_groups") || !json["config_groups"].is_object()) return format;
    for (const auto& [name, group] : json["config_groups"].items()) {
      if (!group.is_object() || !group.contains("weights") || !group["weights"].is_object()) continue;
      const bool integers = group["weights"].value("type", "int") == "int";
      const std::optional<std::pair<int64_t, int64_t>> block = Block(group["weights"], "block_structure");
      if (!integers && !block.has_value()) continue;
      auto entry = std::make_shared<Group>();
      if (integers) {
        absl::StatusOr<quant::SchemeSpec> spec = IntegerSpec(group["weights"]);
        if (!spec.ok()) return invalid(absl::StrCat(name, ": ", spec.status().message()));
        entry->spec = *spec;
      } else {
        entry->block = *block;
      }
      if (group.contains("targets") && group["targets"].is_array()) {
        for (const Json& target : group["targets"]) {
          if (!target.is_string()) return invalid(absl::StrCat(name, ": a target is no text"));
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
          if (!pattern->ok()) return invalid(absl::StrCat(name, ": the target ", text, " is no pattern that RE2 knows"));
          entry->patterns.push_back(std::move(pattern));
        }
      } else {
        entry->everything = true;
      }
      (integers ? format.groups_ : format.blocks_).push_back(std::move(entry));
    }
  } catch (const Json::exception& error) {
    return invalid(error.what());
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
