#include "daemon/planner/emitted_config.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

quant::SchemeSpec Int4() {
  quant::SchemeSpec spec;
  spec.num_bits = 4;
  spec.group_size = 32;
  spec.symmetric = false;
  return spec;
}

quant::SchemeSpec Int8Channel() {
  quant::SchemeSpec spec;
  spec.num_bits = 8;
  spec.strategy = quant::Strategy::kChannel;
  spec.group_size = 0;
  return spec;
}

Json Build(const std::vector<quant::SchemeSpec>& schemes, const std::vector<ConfigModule>& modules) {
  const absl::StatusOr<std::string> text = BuildQuantizationConfig(schemes, modules);
  EXPECT_THAT(text, IsOk());
  if (!text.ok()) return Json();
  const absl::StatusOr<std::vector<std::string>> differences = CheckQuantizationConfig(*text, schemes, modules, 100);
  EXPECT_THAT(differences, IsOk());
  EXPECT_THAT(*differences, IsEmpty());
  return Json::parse(*text);
}

std::vector<std::string> Targets(const Json& config, const char* group) { return config["config_groups"][group]["targets"]; }

TEST(EmittedConfig, WholeTextOfOneModule) {
  const absl::StatusOr<std::string> text = BuildQuantizationConfig(
      {Int4()}, {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}, {"lm_head", "", Role::kLmHead, false, -1}});
  EXPECT_THAT(text, IsOkAndHolds(std::string(R"json({
  "config_groups": {
    "group_0": {
      "format": "pack-quantized",
      "input_activations": null,
      "output_activations": null,
      "targets": [
        "re:.*\\.mlp\\.up_proj$"
      ],
      "weights": {
        "actorder": null,
        "block_structure": null,
        "dynamic": false,
        "group_size": 32,
        "num_bits": 4,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "scale_dtype": null,
        "strategy": "group",
        "symmetric": false,
        "type": "int",
        "zp_dtype": "torch.int8"
      }
    }
  },
  "format": "pack-quantized",
  "global_compression_ratio": null,
  "ignore": [
    "lm_head"
  ],
  "kv_cache_scheme": null,
  "quant_method": "compressed-tensors",
  "quantization_status": "compressed",
  "transform_config": {},
  "version": "0.19.0"
})json")));
}

TEST(EmittedConfig, ChannelHasNoGroupSizeAndSymmetricNoZeroPoint) {
  const Json config = Build({Int8Channel()}, {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}});
  const Json& weights = config["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["strategy"], "channel");
  EXPECT_TRUE(weights["group_size"].is_null());
  EXPECT_TRUE(weights["zp_dtype"].is_null());
  EXPECT_EQ(weights.size(), 12u);
}

TEST(EmittedConfig, NameThatReadersCouldTakeForSomethingElseIsSpelledAsARegex) {
  const Json config = Build({Int4()}, {{"Linear", "", Role::kOther, false, 0},
                                       {"head", "", Role::kOther, false, 0},
                                       {"", "", Role::kOther, false, 0},
                                       {"re:.*", "", Role::kOther, false, 0},
                                       {"re:a.b", "", Role::kOther, false, 0},
                                       {"encoder.proj", "", Role::kOther, false, 0},
                                       {"lm_head", "", Role::kLmHead, false, -1},
                                       {"Embedding", "", Role::kOther, false, -1},
                                       {"re:[", "", Role::kOther, false, -1}});
  EXPECT_THAT(Targets(config, "group_0"),
              UnorderedElementsAre("re:^$", "re:^Linear$", "re:^head$", "re:^re\\:\\.\\*$", "re:^re\\:a\\.b$", "encoder.proj"));
  EXPECT_THAT(config["ignore"].get<std::vector<std::string>>(), UnorderedElementsAre("lm_head", "re:^Embedding$", "re:^re\\:\\[$"));
}

TEST(EmittedConfig, EveryPreset) {
  for (const std::string& name : quant::PresetNames()) {
    const quant::SchemeSpec spec = *quant::PresetScheme(name);
    const Json config = Build({spec}, {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}});
    const Json& group = config["config_groups"]["group_0"];
    EXPECT_EQ(config["format"], std::string(quant::FormatName(spec))) << name;
    EXPECT_EQ(group["format"], config["format"]) << name;
    EXPECT_EQ(group["weights"].size(), 12u) << name;
    EXPECT_EQ(group["input_activations"].is_null(), spec.activations == quant::Activations::kNone) << name;
    if (spec.activations != quant::Activations::kNone) {
      EXPECT_EQ(group["input_activations"].size(), 12u) << name;
    }
  }
}

TEST(EmittedConfig, ArgumentsOfFloats) {
  const std::vector<ConfigModule> module = {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}};
  const auto group = [&](absl::string_view preset) -> Json {
    return Build({*quant::PresetScheme(preset)}, module)["config_groups"]["group_0"];
  };
  const Json dynamic = group("FP8_DYNAMIC");
  EXPECT_EQ(dynamic["weights"]["strategy"], "channel");
  EXPECT_EQ(dynamic["input_activations"]["strategy"], "token");
  EXPECT_EQ(dynamic["input_activations"]["dynamic"], true);
  EXPECT_TRUE(dynamic["input_activations"]["observer"].is_null());
  const Json block = group("FP8_BLOCK");
  EXPECT_EQ(block["weights"]["block_structure"], Json::array({128, 128}));
  EXPECT_TRUE(block["weights"]["group_size"].is_null());
  EXPECT_EQ(block["input_activations"]["group_size"], 128);
  const Json nvfp4 = group("NVFP4");
  EXPECT_EQ(nvfp4["weights"]["scale_dtype"], "torch.float8_e4m3fn");
  EXPECT_EQ(nvfp4["input_activations"]["dynamic"], "local");
  EXPECT_EQ(nvfp4["input_activations"]["observer"], "static_minmax");
  EXPECT_EQ(group("MXFP4A16")["weights"]["scale_dtype"], "torch.uint8");
  EXPECT_EQ(group("FP8")["input_activations"]["dynamic"], false);
}

TEST(EmittedConfig, MixedPrecision) {
  const Json config = Build({*quant::PresetScheme("NVFP4A16"), *quant::PresetScheme("FP8_DYNAMIC"), *quant::PresetScheme("FP8_BLOCK")},
                            {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0},
                             {"model.layers.0.self_attn.o_proj", "", Role::kAttention, false, 1},
                             {"model.layers.1.self_attn.o_proj", "", Role::kAttention, false, 2}});
  EXPECT_EQ(config["format"], "mixed-precision");
  EXPECT_EQ(config["config_groups"]["group_0"]["format"], "nvfp4-pack-quantized");
  EXPECT_EQ(config["config_groups"]["group_1"]["format"], "float-quantized");
  EXPECT_EQ(
      Build({*quant::PresetScheme("W4A16"), *quant::PresetScheme("W8A16")},
            {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}, {"model.layers.1.mlp.up_proj", "", Role::kMlp, false, 1}})["format"],
      "pack-quantized")
      << "bits may differ within a format";
}

TEST(EmittedConfig, ExpertsAreOnePattern) {
  std::vector<ConfigModule> modules;
  for (int layer = 1; layer < 3; ++layer) {
    for (int expert = 0; expert < 12; ++expert) {
      for (const char* leaf : {"gate_proj", "up_proj", "down_proj"}) {
        modules.push_back({absl::StrCat("model.layers.", layer, ".mlp.experts.", expert, ".", leaf), "", Role::kRoutedExperts, true, 0});
      }
    }
  }
  modules.push_back({"model.layers.0.mlp.gate_proj", "", Role::kMlp, false, -1});
  const Json config = Build({Int4()}, modules);
  EXPECT_THAT(Targets(config, "group_0"), ElementsAre("re:.*\\.mlp\\.experts\\.\\d+\\.(down_proj|gate_proj|up_proj)$"));
  EXPECT_EQ(config["ignore"], Json::array({"model.layers.0.mlp.gate_proj"}));
}

TEST(EmittedConfig, MixtralExpertsAlsoHaveTheOldNames) {
  std::vector<ConfigModule> modules;
  for (const char* leaf : {"w1", "w2", "w3"}) {
    modules.push_back({absl::StrCat("model.layers.0.block_sparse_moe.experts.0.", leaf),
                       absl::StrCat("model.layers.0.mlp.experts.0.", leaf), Role::kRoutedExperts, true, 0});
  }
  const Json config = Build({Int4()}, modules);
  EXPECT_THAT(Targets(config, "group_0"), ElementsAre("re:.*\\.block_sparse_moe\\.experts\\.\\d+\\.(down_proj|gate_proj|up_proj|w1|w2|w3)$",
                                                      "re:.*\\.mlp\\.experts\\.\\d+\\.(down_proj|gate_proj|up_proj|w1|w2|w3)$"));
}

TEST(EmittedConfig, LayersAreNamedWhereTheyDiffer) {
  std::vector<ConfigModule> modules;
  for (int layer = 0; layer < 12; ++layer) {
    modules.push_back({absl::StrCat("model.layers.", layer, ".mlp.up_proj"), "", Role::kMlp, false, layer == 1 ? -1 : layer == 11 ? 1 : 0});
  }
  const Json config = Build({Int4(), Int8Channel()}, modules);
  EXPECT_THAT(Targets(config, "group_0"), ElementsAre("re:.*layers\\.(0|2|3|4|5|6|7|8|9|10)\\.mlp\\.up_proj$"));
  EXPECT_THAT(Targets(config, "group_1"), ElementsAre("re:.*layers\\.11\\.mlp\\.up_proj$"));
  EXPECT_EQ(config["ignore"], Json::array({"model.layers.1.mlp.up_proj"}));
}

TEST(EmittedConfig, PrefixesAreNamedWhereLayersDoNotTellApart) {
  const Json config =
      Build({Int4()}, {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}, {"mtp.layers.0.mlp.up_proj", "", Role::kMtp, false, -1}});
  EXPECT_THAT(Targets(config, "group_0"), ElementsAre("re:.*model\\.layers\\.0\\.mlp\\.up_proj$"));
}

TEST(EmittedConfig, ExactNamesWhereNoPatternFits) {
  const Json config = Build({Int4()}, {{"layers.0.up_proj", "", Role::kMlp, false, 0},
                                       {"xlayers.0.up_proj", "", Role::kMlp, false, -1},
                                       {"lm_head", "", Role::kLmHead, false, 0}});
  EXPECT_THAT(Targets(config, "group_0"), ElementsAre("layers.0.up_proj", "lm_head"));
}

TEST(EmittedConfig, NamesOfTransformersAreTargetsAndIgnoredToo) {
  const ConfigModule shared = {"model.layers.1.mlp.shared_expert.up_proj", "model.layers.1.mlp.shared_experts.up_proj",
                               Role::kSharedExperts, false, 0};
  Json config = Build({Int4()}, {shared});
  EXPECT_THAT(Targets(config, "group_0"),
              ElementsAre("re:.*\\.mlp\\.shared_expert[s]\\.up_proj$", "re:.*\\.mlp\\.shared_expert\\.up_proj$"))
      << "without the word experts, by which transformers finds the routed ones";
  ConfigModule left = shared;
  left.scheme = -1;
  config = Build({Int4()}, {left, {"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}});
  EXPECT_EQ(config["ignore"], Json::array({"model.layers.1.mlp.shared_expert.up_proj", "model.layers.1.mlp.shared_experts.up_proj"}));
}

TEST(EmittedConfig, NamesWithSpecialCharacters) {
  Build({Int4()}, {{"model.layers.0.a+b(c)[d]|e^f$g\\h-i.up_proj", "", Role::kMlp, false, 0},
                   {"model.layers.0.aab.up_proj", "", Role::kMlp, false, -1},
                   {"model.layers.0.\xc3\xa9.up_proj", "", Role::kMlp, false, 0}});
}

TEST(EmittedConfig, CheckFindsEachKindOfDifference) {
  const std::vector<ConfigModule> modules = {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0},
                                             {"lm_head", "", Role::kLmHead, false, -1}};
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, BuildQuantizationConfig({Int4()}, modules));
  const auto check = [&](const std::vector<quant::SchemeSpec>& schemes, const std::vector<ConfigModule>& of) {
    return *CheckQuantizationConfig(text, schemes, of, 100);
  };
  EXPECT_THAT(check({Int8Channel()}, modules), ElementsAre(testing::HasSubstr("says otherwise")));
  EXPECT_THAT(check({Int4()}, {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, -1}}),
              ElementsAre(testing::HasSubstr("is not quantized, but")));
  EXPECT_THAT(check({Int4()}, {{"lm_head", "", Role::kLmHead, false, 0}}), ElementsAre(testing::HasSubstr("no group")));
  EXPECT_THAT(CheckQuantizationConfig("{}", {}, {}, 1), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(CheckQuantizationConfig("[", {}, {}, 1), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace quern::daemon
