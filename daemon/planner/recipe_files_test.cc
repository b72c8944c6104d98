// The recipes of docs/recipes, planned against a model of the kind that they are for.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/test_checkpoint.h"

namespace quern::daemon {
namespace {

using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kRecipes[] = "docs/recipes";
constexpr int kLayers = 48;
constexpr uint64_t kHidden = 128;

// Laguna's names and 48 layers, with two experts a layer.
void WriteLaguna(TestCheckpoint& checkpoint) {
  checkpoint.AddOuter(64, kHidden);
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
      checkpoint.Add(absl::StrCat(prefix, "self_attn.", name, ".weight"), {kHidden, kHidden});
    }
    checkpoint.Add(absl::StrCat(prefix, "self_attn.g_proj.weight"), {4, kHidden});
    checkpoint.Add(absl::StrCat(prefix, "input_layernorm.weight"), {kHidden});
    const std::string mlp = absl::StrCat(prefix, "mlp.");
    std::vector<std::string> parents = {mlp};
    if (layer > 0) {
      parents = {mlp + "experts.0.", mlp + "experts.1.", mlp + "shared_expert."};
      checkpoint.Add(mlp + "gate.weight", {2, kHidden});
    }
    for (const std::string& parent : parents) {
      for (const char* name : {"gate_proj", "up_proj", "down_proj"})
        checkpoint.Add(absl::StrCat(parent, name, ".weight"), {kHidden, kHidden});
    }
  }
  checkpoint.Write();
}

class RecipeFilesTest : public testing::Test {
 protected:
  void SetUp() override { WriteLaguna(checkpoint_); }

  absl::StatusOr<Plan> MakePlanOf(const std::string& name, const std::string& export_format = "") const {
    QUERN_ASSIGN_OR_RETURN(const std::string recipe, ReadFileToString(JoinPath(kRecipes, name)));
    quern::v1::JobSpec job = QuantizeJob(checkpoint_.path(), recipe);
    job.mutable_quantize()->set_export_format(export_format);
    return MakePlan(job, /*with_fingerprints=*/false);
  }

  static std::vector<std::string> Warnings(const Plan& plan) { return {plan.summary.warnings().begin(), plan.summary.warnings().end()}; }

  // Layer -> first word of the scheme of its routed experts, "" where they are left alone.
  static std::map<int, std::string> ExpertSchemes(const Plan& plan) {
    std::map<int, std::string> schemes;
    for (const quern::v1::TensorFate& fate : TensorFates(plan)) {
      if (fate.role() != "routed_experts") continue;
      const int layer = std::stoi(fate.tensor().substr(std::string("model.layers.").size()));
      schemes[layer] = fate.scheme().substr(0, fate.scheme().find(' '));
    }
    return schemes;
  }

  static double BitsOf(const Plan& plan, const std::string& role) {
    for (const quern::v1::RoleBits& bits : plan.summary.effective_bits()) {
      if (bits.role() == role) return bits.bits();
    }
    return 0;
  }

  TestCheckpoint checkpoint_{"laguna"};
};

TEST_F(RecipeFilesTest, EveryFileIsPlanned) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, ListDirectory(kRecipes));
  int recipes = 0;
  for (const std::string& name : names) {
    if (!absl::EndsWith(name, ".yaml")) continue;
    ++recipes;
    QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlanOf(name));
    EXPECT_GT(plan.summary.quantized_tensors(), 0u) << name;
    // The resolved recipe plans the same.
    QUERN_ASSERT_OK_AND_ASSIGN(const Plan again, MakePlan(QuantizeJob(checkpoint_.path(), plan.summary.resolved_recipe()), false));
    EXPECT_EQ(again.summary.resolved_recipe(), plan.summary.resolved_recipe()) << name;
    EXPECT_EQ(again.summary.quantization_config(), plan.summary.quantization_config()) << name;
  }
  EXPECT_EQ(recipes, 5);
}

TEST_F(RecipeFilesTest, LagunaInFourBits) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlanOf("laguna-w4a16-g32-asym.yaml"));
  EXPECT_EQ(plan.summary.quantized_tensors(), 47u * 2 * 3);
  EXPECT_NEAR(BitsOf(plan, "routed_experts"), 4.625, 0.01);
  EXPECT_EQ(BitsOf(plan, "attention"), 16);
  const Json config = Json::parse(plan.summary.quantization_config());
  EXPECT_EQ(config["config_groups"]["group_0"]["targets"], Json::array({"re:.*\\.mlp\\.experts\\.\\d+\\.(down_proj|gate_proj|up_proj)$"}));
  EXPECT_THAT(Warnings(plan), Contains(AllOf(HasSubstr("transformers cannot load"), HasSubstr("W4A16_ASYM g32"))));
}

TEST_F(RecipeFilesTest, QualityFirst) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlanOf("laguna-quality-first.yaml"));
  const std::map<int, std::string> schemes = ExpertSchemes(plan);
  std::map<std::string, std::set<int>> layers;
  for (const auto& [layer, scheme] : schemes) layers[scheme].insert(layer);
  EXPECT_THAT(layers[""], ElementsAre(1, 46, 47));
  EXPECT_THAT(layers["float8"], ElementsAre(2, 3, 43, 44, 45));
  EXPECT_EQ(layers["float4"].size(), 39u);
  EXPECT_NEAR(BitsOf(plan, "attention"), 8, 0.2);
  EXPECT_NEAR(BitsOf(plan, "routed_experts"), (39 * 4.5 + 5 * 8.125 + 3 * 16) / 47, 0.02);
  const Json config = Json::parse(plan.summary.quantization_config());
  EXPECT_EQ(config["format"], "mixed-precision");
  EXPECT_THAT(Warnings(plan), Contains(HasSubstr("differ between layers")));
}

TEST_F(RecipeFilesTest, AttentionInFp8WithInt4Experts) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlanOf("fp8-attention-int4-experts.yaml"));
  const Json config = Json::parse(plan.summary.quantization_config());
  EXPECT_EQ(config["format"], "mixed-precision");
  EXPECT_EQ(config["config_groups"]["group_0"]["format"], "pack-quantized");
  EXPECT_EQ(config["config_groups"]["group_1"]["format"], "float-quantized");
  EXPECT_THAT(Warnings(plan), Not(Contains(HasSubstr("transformers"))));
}

TEST_F(RecipeFilesTest, BitsByLayer) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlanOf("int4-int8-experts-by-layer.yaml"));
  for (const auto& [layer, scheme] : ExpertSchemes(plan)) {
    EXPECT_EQ(scheme, layer < 8 || layer >= 44 ? "int8" : "int4") << layer;
  }
  EXPECT_EQ(Json::parse(plan.summary.quantization_config())["format"], "pack-quantized");
}

TEST_F(RecipeFilesTest, ModelOpt) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlanOf("modelopt-nvfp4-experts-fp8-attention.yaml", "modelopt"));
  const Json file = Json::parse(plan.summary.hf_quant_config());
  EXPECT_EQ(file["quantization"]["quant_algo"], "MIXED_PRECISION");
  EXPECT_EQ(file["quantization"]["quantized_layers"].size(), plan.summary.quantized_tensors());
  EXPECT_EQ(Json::parse(plan.summary.quantization_config())["quant_method"], "modelopt");
  EXPECT_THAT(MakePlanOf("laguna-w4a16-g32-asym.yaml", "modelopt"),
              StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("ModelOpt"), HasSubstr("NVFP4A16"))));
  EXPECT_THAT(MakePlanOf("laguna-w4a16-g32-asym.yaml", "gguf"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("gguf")));
}

TEST_F(RecipeFilesTest, StaticScalesNeedAFile) {
  const auto plan = [&](const char* scheme) {
    return MakePlan(QuantizeJob(checkpoint_.path(), absl::StrCat("scheme: ", scheme)), /*with_fingerprints=*/false);
  };
  EXPECT_THAT(plan("FP8"), StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("--activation-scales"), HasSubstr("FP8_DYNAMIC"))));
  EXPECT_THAT(plan("NVFP4"), StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("--activation-scales"), HasSubstr("NVFP4A16"))));
  quern::v1::JobSpec job = QuantizeJob(checkpoint_.path(), "scheme: NVFP4A16");
  job.mutable_quantize()->set_activation_scales("/nowhere");
  EXPECT_THAT(MakePlan(job, false), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no scheme of the recipe")));
}

TEST_F(RecipeFilesTest, MagnitudesThatDifferWithinASetAreToldOf) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  const std::string layer = "model.layers.0.";
  std::map<std::string, float> amax;
  for (const char* const name :
       {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
    amax[layer + name] = 2;
  }
  amax[layer + "self_attn.o_proj"] = 3;
  const std::string path = JoinPath(source.path(), "amax");
  const auto warnings = [&](const char* scheme) {
    std::vector<checkpoint::TensorInfo> infos;
    std::string data;
    for (const auto& [name, value] : amax) {
      infos.push_back({name, DType::kF32, {}, data.size(), data.size() + 4});
      data.append(reinterpret_cast<const char*>(&value), 4);
    }
    WriteText(path, checkpoint::BuildSafetensorsHeader(infos) + data);
    quern::v1::JobSpec job = QuantizeJob(source.path(), absl::StrCat("scheme: ", scheme));
    job.mutable_quantize()->set_activation_scales(path);
    const absl::StatusOr<Plan> plan = MakePlan(job, /*with_fingerprints=*/false);
    EXPECT_THAT(plan, IsOk());
    return plan.ok() ? Warnings(*plan) : std::vector<std::string>();
  };
  for (const char* const scheme : {"NVFP4", "FP8"})
    EXPECT_THAT(warnings(scheme), Not(Contains(HasSubstr("--activation-scales")))) << scheme;
  amax[layer + "self_attn.k_proj"] = 2.5;
  for (const char* const scheme : {"NVFP4", "FP8"}) {
    EXPECT_THAT(warnings(scheme), Contains(AllOf(HasSubstr("--activation-scales"), HasSubstr("one matrix"), HasSubstr("layers.0.self_attn"),
                                                 Not(HasSubstr("mlp")))))
        << scheme;
  }
}

}  // namespace
}  // namespace quern::daemon
