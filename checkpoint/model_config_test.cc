#include "checkpoint/model_config.h"

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::checkpoint {
namespace {

using testing::AllOf;
using testing::Eq;
using testing::HasSubstr;
using testing::Optional;

TEST(ModelConfigTest, ReadsTheTrainedLaguna) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, ReadFileToString("tests/data/laguna-micro/config.json"));
  QUERN_ASSERT_OK_AND_ASSIGN(const ModelConfig config, ParseModelConfig(text, "config.json"));
  EXPECT_EQ(config.text, text);
  EXPECT_EQ(config.model_type, "laguna");
  EXPECT_EQ(config.outer_model_type, "laguna");
  EXPECT_THAT(config.hidden_size, Optional(128u));
  EXPECT_THAT(config.num_hidden_layers, Optional(4u));
  EXPECT_THAT(config.num_experts, Optional(8u));
  EXPECT_THAT(config.intermediate_size, Optional(384u));
  EXPECT_THAT(config.moe_intermediate_size, Optional(128u));
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(config.quantization_config, "");
}

TEST(ModelConfigTest, TextConfigComesFirst) {
  QUERN_ASSERT_OK_AND_ASSIGN(const ModelConfig config,
                             ParseModelConfig(R"({"model_type": "mistral3", "hidden_size": 1, "vision_config": {"hidden_size": 2},
                "text_config": {"model_type": "mistral", "hidden_size": 3, "tie_word_embeddings": true, "quantization_config": {"a": 1}}})",
                                              "config.json"));
  EXPECT_EQ(config.model_type, "mistral");
  EXPECT_EQ(config.outer_model_type, "mistral3");
  EXPECT_THAT(config.hidden_size, Optional(3u));
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.quantization_config, R"({"a": 1})");
}

TEST(ModelConfigTest, NamesOfExpertCountsDiffer) {
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const ModelConfig config,
                               ParseModelConfig(absl::StrCat("{\"", key, "\": 8, \"intermediate_size\": 64}"), "config.json"));
    EXPECT_THAT(config.num_experts, Optional(8u)) << key;
    EXPECT_THAT(config.moe_intermediate_size, Optional(64u)) << key;
  }
}

TEST(ModelConfigTest, SizesThatAreNoSingleNumberAreUnknown) {
  QUERN_ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      ParseModelConfig(
          R"({"intermediate_size": [1, 2], "hidden_size": null, "num_hidden_layers": -1, "num_experts": 1.5, "model_type": 7})",
          "config.json"));
  EXPECT_THAT(config.intermediate_size, Eq(std::nullopt));
  EXPECT_THAT(config.hidden_size, Eq(std::nullopt));
  EXPECT_THAT(config.num_hidden_layers, Eq(std::nullopt));
  EXPECT_THAT(config.num_experts, Eq(std::nullopt));
  EXPECT_EQ(config.model_type, "");
}

TEST(ModelConfigTest, BadJsonNamesFileAndOffset) {
  EXPECT_THAT(ParseModelConfig("{\"a\": }", "dir/config.json"),
              StatusIs(kInvalid, AllOf(HasSubstr("dir/config.json"), HasSubstr("offset 6"))));
  EXPECT_THAT(ParseModelConfig("version https://git-lfs.github.com/spec/v1\n", "c"), StatusIs(kInvalid, HasSubstr("Git-LFS pointer")));
  EXPECT_THAT(ParseModelConfig("[]", "c"), StatusIs(kInvalid));
}

// "config.json that already has quantization_config": replace the old config
TEST(ModelConfigCases, OldQuantizationConfigIsReplacedAndNothingElseTouched) {
  const std::string before =
      "{\n  \"router_bound\": Infinity,\n  \"quantization_config\": {\"quant_method\": \"fp8\"},\n  \"eps\": 1e-06,\n  \"z\": NaN\n}";
  QUERN_ASSERT_OK_AND_ASSIGN(const ModelConfig config, ParseModelConfig(before, "config.json"));
  EXPECT_EQ(config.quantization_config, R"({"quant_method": "fp8"})");
  EXPECT_THAT(
      WithQuantizationConfig(config, "{\n  \"quant_method\": \"compressed-tensors\"\n}"),
      IsOkAndHolds("{\n  \"router_bound\": Infinity,\n  \"quantization_config\": {\n    \"quant_method\": \"compressed-tensors\"\n  },\n"
                   "  \"eps\": 1e-06,\n  \"z\": NaN\n}"));
}

TEST(ModelConfigCases, OldNameOfQuantizationConfigIsReadAndDropped) {
  QUERN_ASSERT_OK_AND_ASSIGN(ModelConfig config,
                             ParseModelConfig(R"({"compression_config": {"format": "pack-quantized"}, "a": 1})", "config.json"));
  EXPECT_EQ(config.quantization_config, R"({"format": "pack-quantized"})");
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string with, WithQuantizationConfig(config, "{}"));
  EXPECT_THAT(with, Not(HasSubstr("compression_config")));
  EXPECT_THAT(with, HasSubstr(R"("quantization_config": {})"));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string without, WithoutQuantizationConfig(config));
  EXPECT_THAT(without, Not(HasSubstr("compression_config")));
  EXPECT_THAT(without, HasSubstr(R"("a": 1)"));

  const char* const nested = R"({"text_config": {"compression_config": {"quantization_config": {"format": "x"}, "sparsity_config": {}}}})";
  QUERN_ASSERT_OK_AND_ASSIGN(config, ParseModelConfig(nested, "config.json"));
  EXPECT_EQ(config.quantization_config, R"({"format": "x"})");
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string plain, WithoutQuantizationConfig(config));
  EXPECT_THAT(plain, Not(HasSubstr("compression_config")));

  const char* const both = R"({"compression_config": {"format": "old"}, "quantization_config": {"format": "new"}})";
  QUERN_ASSERT_OK_AND_ASSIGN(config, ParseModelConfig(both, "config.json"));
  EXPECT_EQ(config.quantization_config, R"({"format": "new"})");
}

TEST(ModelConfigCases, QuantizationConfigUnderTextConfigIsDropped) {
  QUERN_ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      ParseModelConfig(R"({"text_config": {"hidden_size": 8, "quantization_config": {"a": 1}}, "x": 1.0})", "config.json"));
  EXPECT_THAT(WithQuantizationConfig(config, "{}"),
              IsOkAndHolds(R"({"text_config": {"hidden_size": 8}, "x": 1.0, "quantization_config": {}})"));
}

}  // namespace
}  // namespace quern::checkpoint
