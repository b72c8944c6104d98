#include "daemon/planner/modelopt_config.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "daemon/planner/module_names.h"

namespace quern::daemon {
namespace {

using Json = nlohmann::json;
// Keeps the order of members, which is the order of ModelOpt's own file. Finding a member takes time with their number.
using OrderedJson = nlohmann::ordered_json;

constexpr char kMixed[] = "MIXED_PRECISION";

// Finds which of many names stand within another text, at any place of it.
class NamesWithin {
 public:
  explicit NamesWithin(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      names_.insert(name);
      lengths_.insert(name.size());
      const size_t dot = name.find('.');
      if (dot == std::string::npos) {
        undotted_.push_back(name);
      } else {
        first_components_.insert(name.substr(0, dot));
      }
    }
  }

  // Calls `found` with each name that stands within `text` and is not all of it.
  template <class Found>
  void Find(absl::string_view text, const Found& found) const {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('.', begin), text.size());
      FindAt(text, begin, found);
      // A name with dots that begins within a component ends its first component where that one ends.
      for (const std::string& first : first_components_) {
        if (first.size() < end - begin && absl::EndsWith(text.substr(begin, end - begin), first)) FindAt(text, end - first.size(), found);
      }
      begin = end + 1;
    }
    for (const std::string& name : undotted_) {
      if (name.size() < text.size() && absl::StrContains(text, name)) found(name);
    }
  }

 private:
  template <class Found>
  void FindAt(absl::string_view text, size_t begin, const Found& found) const {
    for (size_t length : lengths_) {
      if (begin + length > text.size()) break;
      if (length == text.size()) continue;
      const auto name = names_.find(text.substr(begin, length));
      if (name != names_.end()) found(*name);
    }
  }

  absl::flat_hash_set<std::string> names_;
  std::set<size_t> lengths_;
  std::set<std::string> first_components_;  // of names with dots
  std::vector<std::string> undotted_;
};

Json LayerConfig(const std::string& algorithm, const quant::SchemeSpec& spec) {
  Json layer = {{"quant_algo", algorithm}};
  if (spec.strategy == quant::Strategy::kTensorGroup) layer["group_size"] = spec.group_size;
  return layer;
}

// A group of config_groups as ModelOpt's converter makes it, for the algorithms that Quern writes.
absl::StatusOr<Json> ConvertedGroup(const Json& layer) {
  const std::string algorithm = layer.at("quant_algo").get<std::string>();
  const auto args = [](int num_bits) { return Json{{"dynamic", false}, {"num_bits", num_bits}, {"type", "float"}}; };
  Json group;
  if (algorithm == "FP8" || algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    group["input_activations"] = args(8);
    group["weights"] = args(8);
    if (algorithm != "FP8") group["weights"]["strategy"] = "channel";
    return group;
  }
  if (algorithm != "NVFP4" && algorithm != "W4A16_NVFP4") {
    return absl::InvalidArgumentError(absl::StrCat("hf_quant_config.json: quant_algo \"", algorithm, "\" is not known here"));
  }
  Json weights = args(4);
  weights["group_size"] = layer.contains("group_size") ? layer.at("group_size") : Json(16);
  if (algorithm == "NVFP4") group["input_activations"] = weights;
  group["weights"] = std::move(weights);
  return group;
}

// modelopt.torch.export.convert_hf_config.convert_hf_quant_config_format; `order` is that of the quantized layers in the file, in which
// their groups are numbered.
absl::StatusOr<Json> Convert(const Json& hf_quant_config, const std::vector<std::string>& order) {
  const Json& quantization = hf_quant_config.at("quantization");
  const std::string algorithm = quantization.at("quant_algo").get<std::string>();
  Json groups = Json::object();
  Json converted;
  if (algorithm == kMixed) {
    std::vector<std::pair<Json, std::vector<std::string>>> by_config;
    const Json& layers = quantization.at("quantized_layers");
    for (const std::string& name : order) {
      const Json& layer = layers.at(name);
      const auto same = std::find_if(by_config.begin(), by_config.end(), [&](const auto& entry) { return entry.first == layer; });
      if (same == by_config.end()) {
        by_config.push_back({layer, {name}});
      } else {
        same->second.push_back(name);
      }
    }
    for (size_t i = 0; i < by_config.size(); ++i) {
      QUERN_ASSIGN_OR_RETURN(Json group, ConvertedGroup(by_config[i].first));
      std::sort(by_config[i].second.begin(), by_config[i].second.end());
      group["targets"] = std::move(by_config[i].second);
      groups[absl::StrCat("group_", i)] = std::move(group);
    }
    converted["config_groups"] = std::move(groups);
    converted["quantized_layers"] = layers;
  } else if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    // The converter writes no groups for it: readers go by quant_algo.
  } else {
    QUERN_ASSIGN_OR_RETURN(Json group, ConvertedGroup(quantization));
    group["targets"] = {"Linear"};
    groups["group_0"] = std::move(group);
    converted["config_groups"] = std::move(groups);
  }
  converted["ignore"] = quantization.contains("exclude_modules") ? quantization.at("exclude_modules") : Json::array();
  converted["quant_algo"] = algorithm;
  if (hf_quant_config.contains("producer")) converted["producer"] = hf_quant_config["producer"];
  converted["quant_method"] = "modelopt";
  return converted;
}

}  // namespace

absl::StatusOr<std::string> ModelOptAlgorithm(const quant::SchemeSpec& spec) {
  if (spec.convention == quant::Convention::kModelOpt && spec.type == quant::NumberType::kFloat) {
    const bool none = spec.activations == quant::Activations::kNone;
    if (spec.num_bits == 4 && spec.strategy == quant::Strategy::kTensorGroup) return none ? "W4A16_NVFP4" : "NVFP4";
    if (spec.num_bits == 8 && spec.strategy == quant::Strategy::kTensor) return "FP8";
    if (spec.num_bits == 8 && spec.strategy == quant::Strategy::kChannel) return "FP8_PER_CHANNEL_PER_TOKEN";
  }
  return absl::InvalidArgumentError(absl::StrCat("scheme \"", spec.ToString(), "\" is none of ModelOpt's"));
}

absl::StatusOr<ModelOptConfigs> BuildModelOptConfigs(const std::vector<quant::SchemeSpec>& schemes,
                                                     const std::vector<ConfigModule>& modules) {
  std::vector<Json> layers;
  std::set<std::string> algorithms;
  for (const quant::SchemeSpec& scheme : schemes) {
    QUERN_ASSIGN_OR_RETURN(const std::string algorithm, ModelOptAlgorithm(scheme));
    layers.push_back(LayerConfig(algorithm, scheme));
    algorithms.insert(layers.back().dump());
  }
  if (schemes.empty()) return absl::InvalidArgumentError("ModelOpt's format has no config without a quantized module");
  std::map<std::string, std::pair<std::string, int>> quantized;  // in natural order
  std::map<std::string, std::string> excluded;
  std::vector<std::string> names;
  for (const ConfigModule& module : modules) {
    if (module.scheme >= 0) {
      quantized[NaturalKey(module.name)] = {module.name, module.scheme};
    } else if (excluded.emplace(NaturalKey(module.name), module.name).second) {
      names.push_back(module.name);
    }
  }
  const NamesWithin finder(names);
  std::set<std::string> unsafe;
  // Loaders take an entry for a glob.
  for (const std::string& name : names) {
    if (name.find_first_of("*?[") != std::string::npos) unsafe.insert(name);
  }
  for (const auto& [key, entry] : quantized) finder.Find(entry.first, [&](const std::string& name) { unsafe.insert(name); });

  OrderedJson exclude = OrderedJson::array();
  for (const auto& [key, name] : excluded) {
    if (unsafe.count(name) == 0) exclude.push_back(name);
  }
  OrderedJson quantization;
  std::vector<std::string> order;
  if (algorithms.size() == 1 && unsafe.empty()) {
    quantization = {{"quant_algo", layers[0]["quant_algo"]}, {"kv_cache_quant_algo", nullptr}};
    if (layers[0].contains("group_size")) quantization["group_size"] = layers[0]["group_size"];
  } else {
    OrderedJson::object_t quantized_layers;
    for (const auto& [key, entry] : quantized) {
      // As a list: each name is there once, and looking it up among all before it would take long.
      quantized_layers.Container::emplace_back(entry.first, OrderedJson(layers[entry.second]));
      order.push_back(entry.first);
    }
    quantization = {{"quant_algo", kMixed}, {"kv_cache_quant_algo", nullptr}};
    quantization["quantized_layers"] = std::move(quantized_layers);
  }
  quantization["exclude_modules"] = std::move(exclude);
  const OrderedJson hf_quant_config = {{"producer", {{"name", "modelopt"}, {"version", kModelOptVersion}}},
                                       {"quantization", std::move(quantization)}};
  try {
    const std::string text = hf_quant_config.dump(4, ' ', /*ensure_ascii=*/true);
    QUERN_ASSIGN_OR_RETURN(const Json converted, Convert(Json::parse(text), order));
    return ModelOptConfigs{text + "\n", converted.dump(2, ' ', /*ensure_ascii=*/true)};
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("a module's name is no valid UTF-8: ", error.what()));
  }
}

absl::StatusOr<std::vector<std::string>> CheckModelOptConfigs(absl::string_view hf_quant_config, absl::string_view quantization_config,
                                                              const std::vector<quant::SchemeSpec>& schemes,
                                                              const std::vector<ConfigModule>& modules, size_t limit) {
  std::vector<Json> expected;
  for (const quant::SchemeSpec& scheme : schemes) {
    QUERN_ASSIGN_OR_RETURN(const std::string algorithm, ModelOptAlgorithm(scheme));
    expected.push_back(LayerConfig(algorithm, scheme));
  }
  std::vector<std::string> differences;
  try {
    const Json config = Json::parse(quantization_config.begin(), quantization_config.end());
    std::vector<std::string> order;
    std::string section;
    const auto note = [&](int depth, Json::parse_event_t event, Json& parsed) {
      if (event == Json::parse_event_t::key && depth == 2) section = parsed.get<std::string>();
      if (event == Json::parse_event_t::key && depth == 3 && section == "quantized_layers") order.push_back(parsed.get<std::string>());
      return true;
    };
    const Json file = Json::parse(hf_quant_config.begin(), hf_quant_config.end(), note);
    QUERN_ASSIGN_OR_RETURN(const Json converted, Convert(file, order));
    if (converted != config) {
      differences.push_back("quantization_config is not what ModelOpt's converter makes of hf_quant_config.json");
    }
    const Json& quantization = file.at("quantization");
    const bool mixed = quantization.at("quant_algo") == kMixed;
    static const auto* const kKeys =
        new std::set<std::string>{"exclude_modules", "group_size", "kv_cache_quant_algo", "quant_algo", "quantized_layers"};
    for (const auto& [key, value] : quantization.items()) {
      if (kKeys->count(key) == 0) differences.push_back(absl::StrCat("hf_quant_config.json has ", key, ", which Quern does not write"));
    }
    absl::flat_hash_map<std::string, Json> layers;
    if (mixed) {
      for (const auto& [name, layer] : quantization.at("quantized_layers").items()) layers.emplace(name, layer);
    }
    Json uniform = {{"quant_algo", quantization.at("quant_algo")}};
    if (quantization.contains("group_size")) uniform["group_size"] = quantization["group_size"];
    const std::vector<std::string> excluded = quantization.at("exclude_modules").get<std::vector<std::string>>();
    const absl::flat_hash_set<std::string> exclude(excluded.begin(), excluded.end());
    const NamesWithin finder(excluded);
    for (const ConfigModule& module : modules) {
      if (differences.size() >= limit) break;
      const bool named = exclude.contains(module.name);
      const auto layer = layers.find(module.name);
      const bool said = mixed ? layer != layers.end() && !named : !named;
      if (said != (module.scheme >= 0)) {
        differences.push_back(absl::StrCat(module.name, module.scheme >= 0
                                                            ? " is quantized, but hf_quant_config.json says that it is not"
                                                            : " is not quantized, but hf_quant_config.json says that it is"));
        continue;
      }
      if (module.scheme < 0) continue;
      if ((mixed ? layer->second : uniform) != expected[module.scheme]) {
        differences.push_back(
            absl::StrCat(module.name, " is ", schemes[module.scheme].ToString(), ", but hf_quant_config.json says otherwise"));
      }
      // A name may stand there at several places.
      std::set<std::string> within;
      finder.Find(module.name, [&](const std::string& name) { within.insert(name); });
      for (const std::string& name : within) {
        differences.push_back(
            absl::StrCat(module.name, " is quantized, but loaders take \"", name, "\" of exclude_modules for a part of its name"));
      }
    }
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("hf_quant_config.json or quantization_config: ", error.what()));
  }
  return differences;
}

}  // namespace quern::daemon
