#include "daemon/planner/modelopt_config.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using Json = nlohmann::json;
using quant::SchemeSpec;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

SchemeSpec ModelOpt(absl::string_view preset) { return *quant::ToModelOpt(*quant::PresetScheme(preset)); }

ConfigModule Module(std::string name, int scheme) { return {std::move(name), "", Role::kMlp, false, scheme}; }

ModelOptConfigs BuildChecked(const std::vector<SchemeSpec>& schemes, const std::vector<ConfigModule>& modules) {
  absl::StatusOr<ModelOptConfigs> configs = BuildModelOptConfigs(schemes, modules);
  EXPECT_THAT(configs, IsOk());
  if (!configs.ok()) return {};
  const auto differences = CheckModelOptConfigs(configs->hf_quant_config, configs->quantization_config, schemes, modules, 100);
  EXPECT_THAT(differences, IsOk());
  EXPECT_THAT(*differences, IsEmpty());
  return *std::move(configs);
}

TEST(ModelOptConfig, UniformTexts) {
  const ModelOptConfigs configs = BuildChecked(
      {ModelOpt("NVFP4A16")},
      {Module("model.layers.10.mlp.up_proj", -1), Module("model.layers.2.mlp.up_proj", -1), Module("model.layers.0.mlp.up_proj", 0)});
  EXPECT_EQ(configs.hf_quant_config, R"json({
    "producer": {
        "name": "modelopt",
        "version": "0.47.0"
    },
    "quantization": {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": null,
        "group_size": 16,
        "exclude_modules": [
            "model.layers.2.mlp.up_proj",
            "model.layers.10.mlp.up_proj"
        ]
    }
}
)json");
  EXPECT_EQ(Json::parse(configs.quantization_config), Json::parse(R"json({
    "config_groups": {"group_0": {"targets": ["Linear"],
                                  "weights": {"dynamic": false, "group_size": 16, "num_bits": 4, "type": "float"}}},
    "ignore": ["model.layers.2.mlp.up_proj", "model.layers.10.mlp.up_proj"],
    "producer": {"name": "modelopt", "version": "0.47.0"}, "quant_algo": "W4A16_NVFP4", "quant_method": "modelopt"})json"));
}

TEST(ModelOptConfig, EachAlgorithm) {
  const auto algorithm = [](absl::string_view preset) {
    const Json file = Json::parse(BuildChecked({ModelOpt(preset)}, {Module("a.b", 0)}).hf_quant_config);
    EXPECT_EQ(file["quantization"].contains("group_size"), absl::StrContains(preset, "NVFP4"));
    return file["quantization"]["quant_algo"].get<std::string>();
  };
  EXPECT_EQ(algorithm("FP8"), "FP8");
  EXPECT_EQ(algorithm("FP8_DYNAMIC"), "FP8_PER_CHANNEL_PER_TOKEN");
  EXPECT_EQ(algorithm("NVFP4"), "NVFP4");
  EXPECT_EQ(algorithm("NVFP4A16"), "W4A16_NVFP4");
  EXPECT_THAT(BuildModelOptConfigs({*quant::PresetScheme("NVFP4A16")}, {Module("a.b", 0)}), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(ModelOptConfig, MixedNumbersGroupsInTheOrderOfTheLayers) {
  const ModelOptConfigs configs = BuildChecked({ModelOpt("NVFP4A16"), ModelOpt("FP8_DYNAMIC")},
                                               {Module("model.layers.0.mlp.up_proj", 1), Module("model.layers.10.mlp.up_proj", 0),
                                                Module("model.layers.2.mlp.up_proj", 0), Module("lm_head", -1)});
  const Json config = Json::parse(configs.quantization_config);
  EXPECT_EQ(config["quant_algo"], "MIXED_PRECISION");
  EXPECT_EQ(config["config_groups"]["group_0"]["targets"], Json::array({"model.layers.0.mlp.up_proj"}));
  EXPECT_EQ(config["config_groups"]["group_0"]["weights"]["strategy"], "channel");
  EXPECT_EQ(config["config_groups"]["group_1"]["targets"], Json::array({"model.layers.10.mlp.up_proj", "model.layers.2.mlp.up_proj"}))
      << "sorted as texts";
  EXPECT_EQ(config["quantized_layers"]["model.layers.2.mlp.up_proj"], Json({{"quant_algo", "W4A16_NVFP4"}, {"group_size", 16}}));
  EXPECT_EQ(config["ignore"], Json::array({"lm_head"}));
}

TEST(ModelOptConfig, NoExcludedNameStandsWithinAQuantizedOne) {
  for (const char* name : {"model.layers.1.mlp.gate", "layers.1.mlp.gate_proj", "ers.1.mlp.gate", "gate", "odel"}) {
    const ModelOptConfigs configs = BuildChecked(
        {ModelOpt("NVFP4A16")}, {Module("model.layers.1.mlp.gate_proj", 0), Module(name, -1), Module("model.layers.11.mlp.gate_proj", -1)});
    const Json config = Json::parse(configs.quantization_config);
    EXPECT_EQ(config["quant_algo"], "MIXED_PRECISION") << name;
    EXPECT_EQ(config["ignore"], Json::array({"model.layers.11.mlp.gate_proj"})) << name;
  }
  // The other way round is no problem.
  const ModelOptConfigs configs = BuildChecked({ModelOpt("NVFP4A16")}, {Module("a.gate", 0), Module("a.gate_proj", -1)});
  EXPECT_EQ(Json::parse(configs.quantization_config)["quant_algo"], "W4A16_NVFP4");
}

TEST(ModelOptConfig, NoExcludedNameIsAGlob) {
  for (const char* name : {"*", "a.gat?", "a.[g]ate"}) {
    const Json config = Json::parse(BuildChecked({ModelOpt("NVFP4A16")}, {Module("a.gate", 0), Module(name, -1)}).quantization_config);
    EXPECT_EQ(config["quant_algo"], "MIXED_PRECISION") << name;
    EXPECT_EQ(config["ignore"], Json::array()) << name;
  }
}

TEST(ModelOptConfig, CheckFindsEachKindOfDifference) {
  const std::vector<SchemeSpec> schemes = {ModelOpt("NVFP4A16"), ModelOpt("FP8_DYNAMIC")};
  const std::vector<ConfigModule> modules = {Module("a.up_proj", 0), Module("a.q_proj", 1), Module("lm_head", -1)};
  const ModelOptConfigs configs = BuildChecked(schemes, modules);
  const auto check = [&](const std::vector<ConfigModule>& of) {
    return *CheckModelOptConfigs(configs.hf_quant_config, configs.quantization_config, schemes, of, 100);
  };
  EXPECT_THAT(check({Module("a.up_proj", 1)}), ElementsAre(HasSubstr("says otherwise")));
  EXPECT_THAT(check({Module("a.up_proj", -1)}), ElementsAre(HasSubstr("is not quantized")));
  EXPECT_THAT(check({Module("lm_head", 0)}), Contains(HasSubstr("is quantized, but")));
  EXPECT_THAT(check({Module("model.lm_head_2", 0)}), Contains(HasSubstr("says that it is not")));
  const ModelOptConfigs other = BuildChecked({schemes[0]}, {Module("a.up_proj", 0), Module("lm_head", -1)});
  EXPECT_THAT(*CheckModelOptConfigs(other.hf_quant_config, configs.quantization_config, schemes, {}, 100),
              ElementsAre(HasSubstr("converter")));
  EXPECT_THAT(*CheckModelOptConfigs(other.hf_quant_config, other.quantization_config, schemes, {Module("model.lm_head", 0)}, 100),
              ElementsAre(HasSubstr("a part of its name")));
  EXPECT_THAT(CheckModelOptConfigs("{}", "{}", schemes, modules, 1), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(CheckModelOptConfigs("[", "{}", schemes, modules, 1), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace quern::daemon
