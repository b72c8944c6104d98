#include "checkpoint/synthetic.h"

#include <map>
#include <set>

#include "base/status_matchers.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/model_config.h"

namespace quern::checkpoint {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Optional;

using Shapes = std::map<std::string, std::vector<uint64_t>>;

Shapes ShapesOf(const SyntheticModel& model) {
  Shapes shapes;
  for (const SyntheticTensor& tensor : model.tensors) EXPECT_TRUE(shapes.emplace(tensor.name, tensor.shape).second) << tensor.name;
  return shapes;
}

uint64_t Bytes(const SyntheticModel& model) {
  uint64_t bytes = 0;
  for (const SyntheticTensor& tensor : model.tensors) {
    uint64_t elements = 1;
    for (const uint64_t dimension : tensor.shape) elements *= dimension;
    bytes += elements * BytesPerElement(tensor.dtype);
  }
  return bytes;
}

TEST(SyntheticTest, LagunaHasTheShapesOfTheRealOne) {
  SyntheticOptions options;
  options.family = "laguna";
  options.layers = 3;
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel model, DescribeSynthetic(options));
  Shapes shapes = ShapesOf(model);
  EXPECT_EQ(Bytes(model), 11'505'152'512u);
  EXPECT_THAT(shapes["model.embed_tokens.weight"], ElementsAre(100352, 3072));
  EXPECT_THAT(shapes["lm_head.weight"], ElementsAre(100352, 3072));
  EXPECT_THAT(shapes["model.layers.0.self_attn.q_proj.weight"], ElementsAre(6144, 3072));
  EXPECT_THAT(shapes["model.layers.0.self_attn.o_proj.weight"], ElementsAre(3072, 6144));
  EXPECT_THAT(shapes["model.layers.1.self_attn.q_proj.weight"], ElementsAre(9216, 3072));
  EXPECT_THAT(shapes["model.layers.1.self_attn.k_proj.weight"], ElementsAre(1024, 3072));
  EXPECT_THAT(shapes["model.layers.0.self_attn.g_proj.weight"], ElementsAre(48, 3072));
  EXPECT_THAT(shapes["model.layers.1.self_attn.g_proj.weight"], ElementsAre(72, 3072));
  EXPECT_THAT(shapes["model.layers.1.self_attn.q_norm.weight"], ElementsAre(128));
  EXPECT_THAT(shapes["model.layers.0.mlp.gate_proj.weight"], ElementsAre(12288, 3072));
  EXPECT_THAT(shapes["model.layers.1.mlp.gate.weight"], ElementsAre(256, 3072));
  EXPECT_THAT(shapes["model.layers.1.mlp.experts.e_score_correction_bias"], ElementsAre(256));
  EXPECT_THAT(shapes["model.layers.2.mlp.experts.255.down_proj.weight"], ElementsAre(3072, 1024));
  EXPECT_THAT(shapes["model.layers.2.mlp.shared_expert.up_proj.weight"], ElementsAre(1024, 3072));
  EXPECT_EQ(shapes.count("model.layers.0.mlp.gate.weight"), 0u);
}

TEST(SyntheticTest, AllOfLagunaHasItsNumberOfTensors) {
  SyntheticOptions options;
  options.family = "laguna";
  options.layers = 48;
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel model, DescribeSynthetic(options));
  EXPECT_EQ(model.tensors.size(), 36'769u);
}

// The trained checkpoint was saved by transformers.
TEST(SyntheticTest, LagunaHasTheNamesThatTransformersSaves) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint trained, Checkpoint::Open("tests/data/laguna-micro"));
  SyntheticOptions options;
  options.family = "laguna";
  options.layers = 4;
  options.experts = 8;
  options.hidden = 128;
  options.intermediate = 128;
  options.vocab = 1024;
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel model, DescribeSynthetic(options));
  std::set<std::string> ours, theirs;
  for (const SyntheticTensor& tensor : model.tensors) ours.insert(tensor.name);
  for (const TensorLocation& location : trained.tensors()) theirs.insert(location.info->name);
  EXPECT_EQ(ours, theirs);
  // Sizes that do not depend on the number of heads.
  const Shapes shapes = ShapesOf(model);
  for (const char* name : {"lm_head.weight", "model.layers.2.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.gate.weight",
                           "model.layers.1.mlp.experts.e_score_correction_bias", "model.layers.3.mlp.shared_expert.gate_proj.weight"}) {
    EXPECT_EQ(shapes.at(name), trained.Find(name)->info->shape) << name;
  }
}

TEST(SyntheticTest, ConfigSaysWhatTheTensorsAre) {
  SyntheticOptions options;
  options.family = "laguna";
  options.layers = 5;
  options.experts = 4;
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel model, DescribeSynthetic(options));
  QUERN_ASSERT_OK_AND_ASSIGN(const ModelConfig config, ParseModelConfig(model.config, "config.json"));
  EXPECT_EQ(config.model_type, "laguna");
  EXPECT_THAT(config.num_hidden_layers, Optional(5u));
  EXPECT_THAT(config.num_experts, Optional(4u));
  EXPECT_THAT(config.hidden_size, Optional(3072u));
  EXPECT_THAT(config.moe_intermediate_size, Optional(1024u));
  EXPECT_THAT(model.config, HasSubstr("\"num_attention_heads_per_layer\": [\n    48,\n    72,\n    72,\n    72,\n    48\n  ]"));
  EXPECT_THAT(model.config, HasSubstr("\"num_experts_per_tok\": 4"));
}

TEST(SyntheticTest, OtherFamiliesHaveTheirShapes) {
  SyntheticOptions options;
  options.layers = 1;
  options.family = "qwen3_moe";
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel qwen, DescribeSynthetic(options));
  Shapes shapes = ShapesOf(qwen);
  EXPECT_THAT(shapes["model.layers.0.self_attn.q_proj.weight"], ElementsAre(4096, 2048));
  EXPECT_THAT(shapes["model.layers.0.self_attn.k_proj.weight"], ElementsAre(512, 2048));
  EXPECT_THAT(shapes["model.layers.0.mlp.experts.127.gate_proj.weight"], ElementsAre(768, 2048));

  options.family = "mixtral";
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel mixtral, DescribeSynthetic(options));
  shapes = ShapesOf(mixtral);
  EXPECT_THAT(shapes["model.layers.0.block_sparse_moe.experts.7.w1.weight"], ElementsAre(14336, 4096));
  EXPECT_THAT(shapes["model.layers.0.block_sparse_moe.experts.7.w2.weight"], ElementsAre(4096, 14336));
  EXPECT_THAT(shapes["model.layers.0.self_attn.v_proj.weight"], ElementsAre(1024, 4096));

  options.family = "llama";
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel llama, DescribeSynthetic(options));
  shapes = ShapesOf(llama);
  EXPECT_THAT(shapes["model.layers.0.mlp.down_proj.weight"], ElementsAre(4096, 14336));
  EXPECT_THAT(shapes["model.layers.0.self_attn.k_proj.weight"], ElementsAre(1024, 4096));
}

TEST(SyntheticTest, DtypeIsThatOfWeightsAndConfig) {
  SyntheticOptions options;
  options.family = "llama";
  options.layers = 1;
  options.dtype = DType::kF16;
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel model, DescribeSynthetic(options));
  for (const SyntheticTensor& tensor : model.tensors) EXPECT_EQ(tensor.dtype, DType::kF16);
  EXPECT_THAT(model.config, HasSubstr("\"dtype\": \"float16\""));
  options.dtype = DType::kI8;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("I8")));
}

TEST(SyntheticTest, DeviationsAreThoseOfTrainedModels) {
  SyntheticOptions options;
  options.family = "laguna";
  options.layers = 2;
  QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel model, DescribeSynthetic(options));
  for (const SyntheticTensor& tensor : model.tensors) {
    if (tensor.distribution == "ones") continue;
    EXPECT_EQ(tensor.distribution, "normal") << tensor.name;
    EXPECT_GT(tensor.standard_deviation, 0.003) << tensor.name;
    EXPECT_LT(tensor.standard_deviation, 0.04) << tensor.name;
  }
}

TEST(SyntheticTest, ImpossibleRequestsAreRefused) {
  SyntheticOptions options;
  options.family = "gpt";
  options.layers = 1;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("laguna, qwen3_moe, mixtral, llama")));
  options.family = "laguna";
  options.layers = 0;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("layers")));
  options.layers = 1;
  options.hidden = 100;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("hidden is 100")));
  options.hidden = 48;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("at least 64")));
  options.hidden = 0;
  options.vocab = 4'000'000'000;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("vocab")));
  options.vocab = 0;
  options.layers = 4'000'000'000;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("tensors")));
  options = {};
  options.family = "llama";
  options.layers = 1;
  options.experts = 4;
  EXPECT_THAT(DescribeSynthetic(options), StatusIs(kInvalid, HasSubstr("has no experts")));
}

}  // namespace
}  // namespace quern::checkpoint
