#include "daemon/planner/loader_notes.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> NotesOfExperts(absl::string_view preset) {
  return LoaderNotes({*quant::PresetScheme(preset)}, {{"model.layers.0.mlp.experts.0.up_proj", "", Role::kRoutedExperts, true, 0}});
}

std::vector<std::string> NotesOfDense(absl::string_view preset) {
  return LoaderNotes({*quant::PresetScheme(preset)}, {{"model.layers.0.mlp.up_proj", "", Role::kMlp, false, 0}});
}

TEST(LoaderNotes, DenseModelsLoad) {
  for (const char* name : {"W2A16", "W4A16_ASYM", "W8A16", "W4A8", "W8A8", "W4AFP8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8A16", "NVFP4",
                           "NVFP4A16", "MXFP4", "MXFP8"}) {
    EXPECT_THAT(NotesOfDense(name), IsEmpty()) << name;
  }
}

TEST(LoaderNotes, WhatVllmHasNoKernelsFor) {
  for (const char* name : {"W4A4", "W2A8", "W6A8"}) EXPECT_THAT(NotesOfDense(name), ElementsAre(HasSubstr("vLLM cannot serve"))) << name;
  EXPECT_THAT(NotesOfExperts("FP8A16"), ElementsAre(AllOf(HasSubstr("vLLM cannot serve"), HasSubstr("FP8_DYNAMIC"))));
  EXPECT_THAT(LoaderNotes({*quant::PresetScheme("FP8_DYNAMIC")}, {{"model.layers.0.mlp.gate", "", Role::kRouter, false, 0}}),
              ElementsAre(HasSubstr("routers")));
}

// What vLLM serves of all schemes of compressed-tensors that a recipe can express: of integers the bits, of floats the type.
TEST(LoaderNotes, WhatVllmServes) {
  using quant::Activations;
  using quant::NumberType;
  using quant::Strategy;
  std::map<std::string, std::string> served;
  int all = 0;
  for (const bool experts : {false, true}) {
    for (const NumberType type : {NumberType::kInt, NumberType::kFloat}) {
      for (int bits = 2; bits <= 8; ++bits) {
        for (const auto& [strategy, group] : std::vector<std::pair<Strategy, int64_t>>{{Strategy::kTensor, 0},
                                                                                       {Strategy::kChannel, 0},
                                                                                       {Strategy::kGroup, 32},
                                                                                       {Strategy::kGroup, 128},
                                                                                       {Strategy::kBlock, 128},
                                                                                       {Strategy::kTensorGroup, 16}}) {
          for (const bool symmetric : {true, false}) {
            for (const Activations inputs :
                 {Activations::kNone, Activations::kInt4Token, Activations::kInt8Token, Activations::kFp8Token, Activations::kFp8Group128,
                  Activations::kFp8Static, Activations::kNvfp4Static, Activations::kMxfp4, Activations::kMxfp8}) {
              quant::SchemeSpec spec{.num_bits = bits, .type = type, .strategy = strategy, .group_size = group, .symmetric = symmetric};
              spec.activations = inputs;
              if (type == NumberType::kFloat && strategy == Strategy::kGroup) spec.scale = quant::ScaleType::kE8m0;
              if (strategy == Strategy::kTensorGroup) spec.scale = quant::ScaleType::kE4m3;
              if (!quant::CheckSupported(spec).ok()) continue;
              ++all;
              if (!VllmObstacle(spec, experts).empty()) continue;
              std::string text = absl::StrReplaceAll(spec.ToString(), {{" observer=minmax numerics=reference", ""}});
              const std::string number = absl::StrCat(bits);
              text.erase(text.find(number), 1);
              served[absl::StrCat(experts ? "experts " : "linear ", text)] += number;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(all, 476);
  const std::map<std::string, std::string> expected = {{"experts float block=128 symmetric activations=fp8_group128", "8"},
                                                       {"experts float channel symmetric activations=fp8_token", "8"},
                                                       {"experts float group=32 symmetric scale=e8m0", "48"},
                                                       {"experts float group=32 symmetric scale=e8m0 activations=mxfp4", "4"},
                                                       {"experts float group=32 symmetric scale=e8m0 activations=mxfp8", "8"},
                                                       {"experts float tensor symmetric activations=fp8_static", "8"},
                                                       {"experts float tensor_group=16 symmetric scale=e4m3", "4"},
                                                       {"experts float tensor_group=16 symmetric scale=e4m3 activations=nvfp4_static", "4"},
                                                       {"experts int channel asymmetric", "2345678"},
                                                       {"experts int channel symmetric", "2345678"},
                                                       {"experts int channel symmetric activations=int8_token", "48"},
                                                       {"experts int group=128 asymmetric", "2345678"},
                                                       {"experts int group=128 symmetric", "2345678"},
                                                       {"experts int group=128 symmetric activations=fp8_token", "4"},
                                                       {"experts int group=128 symmetric activations=int8_token", "4"},
                                                       {"experts int group=32 asymmetric", "2345678"},
                                                       {"experts int group=32 symmetric", "2345678"},
                                                       {"experts int group=32 symmetric activations=int8_token", "4"},
                                                       {"linear float block=128 symmetric activations=fp8_group128", "8"},
                                                       {"linear float channel symmetric", "8"},
                                                       {"linear float channel symmetric activations=fp8_static", "8"},
                                                       {"linear float channel symmetric activations=fp8_token", "8"},
                                                       {"linear float group=32 symmetric scale=e8m0", "48"},
                                                       {"linear float group=32 symmetric scale=e8m0 activations=mxfp4", "4"},
                                                       {"linear float group=32 symmetric scale=e8m0 activations=mxfp8", "8"},
                                                       {"linear float tensor symmetric", "8"},
                                                       {"linear float tensor symmetric activations=fp8_static", "8"},
                                                       {"linear float tensor symmetric activations=fp8_token", "8"},
                                                       {"linear float tensor_group=16 symmetric scale=e4m3", "4"},
                                                       {"linear float tensor_group=16 symmetric scale=e4m3 activations=nvfp4_static", "4"},
                                                       {"linear int channel asymmetric", "2345678"},
                                                       {"linear int channel symmetric", "2345678"},
                                                       {"linear int channel symmetric activations=int8_token", "48"},
                                                       {"linear int group=128 asymmetric", "2345678"},
                                                       {"linear int group=128 symmetric", "2345678"},
                                                       {"linear int group=128 symmetric activations=fp8_token", "4"},
                                                       {"linear int group=128 symmetric activations=int8_token", "4"},
                                                       {"linear int group=32 asymmetric", "2345678"},
                                                       {"linear int group=32 symmetric", "2345678"},
                                                       {"linear int group=32 symmetric activations=int8_token", "4"},
                                                       {"linear int tensor symmetric activations=int8_token", "8"}};
  EXPECT_EQ(served, expected);
}

TEST(LoaderNotes, EmbeddingsAndRouters) {
  const auto notes = [](const quant::SchemeSpec& spec, Role role) { return LoaderNotes({spec}, {{"model.x", "", role, false, 0}}); };
  for (const char* name : {"W2A16", "W4A16", "W8A16"}) EXPECT_THAT(notes(*quant::PresetScheme(name), Role::kEmbeddings), IsEmpty()) << name;
  for (const char* name : {"W3A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8A16", "NVFP4A16", "MXFP4A16"}) {
    EXPECT_THAT(notes(*quant::PresetScheme(name), Role::kEmbeddings),
                ElementsAre(AllOf(HasSubstr("vLLM cannot serve"), HasSubstr("modules of embeddings"), HasSubstr("take W4A16"))))
        << name;
  }
  const quant::SchemeSpec modelopt = *quant::ToModelOpt(*quant::PresetScheme("FP8_DYNAMIC"));
  for (const auto& [role, word] : std::map<Role, std::string>{{Role::kEmbeddings, "embeddings"}, {Role::kRouter, "routers"}}) {
    EXPECT_THAT(notes(modelopt, role), ElementsAre(AllOf(HasSubstr("vLLM cannot load"), HasSubstr(word)),
                                                   AllOf(HasSubstr("transformers cannot"), Not(HasSubstr("vLLM loads")))));
  }
}

TEST(LoaderNotes, ExpertsThatLoad) {
  for (const char* name : {"W3A16", "W4A16", "W5A16", "W8A16", "FP8_DYNAMIC", "MXFP4A16"})
    EXPECT_THAT(NotesOfExperts(name), IsEmpty()) << name;
}

TEST(LoaderNotes, ExpertsThatDoNot) {
  EXPECT_THAT(LoaderNotes({*quant::SchemeSpec::Parse("int4 tensor symmetric observer=minmax numerics=reference")},
                          {{"model.layers.0.mlp.experts.0.up_proj", "", Role::kRoutedExperts, true, 0}}),
              ElementsAre(AllOf(HasSubstr("vLLM cannot serve"), HasSubstr("routed_experts"), HasSubstr("channel or group"))));
  for (const char* name : {"W4A16_ASYM", "FP8_BLOCK", "MXFP8A16", "W8A8"}) {
    EXPECT_THAT(NotesOfExperts(name), ElementsAre(AllOf(HasSubstr("cannot load"), HasSubstr(name), HasSubstr("quern dequantize")))) << name;
  }
  EXPECT_THAT(NotesOfExperts("NVFP4A16"), ElementsAre(HasSubstr("wrong values")));
}

TEST(LoaderNotes, ExpertsThatDiffer) {
  std::vector<ConfigModule> modules;
  for (int layer = 0; layer < 2; ++layer) {
    modules.push_back({absl::StrCat("model.layers.", layer, ".mlp.experts.0.up_proj"), "", Role::kRoutedExperts, true, layer - 1});
  }
  EXPECT_THAT(LoaderNotes({*quant::PresetScheme("W4A16")}, modules),
              ElementsAre(AllOf(HasSubstr("not quantized, W4A16 g128"), HasSubstr("one scheme for all"))));
}

TEST(LoaderNotes, ModelOpt) {
  const ConfigModule expert = {"model.layers.0.mlp.experts.0.up_proj", "", Role::kRoutedExperts, true, 0};
  EXPECT_THAT(LoaderNotes({*quant::ToModelOpt(*quant::PresetScheme("NVFP4A16"))}, {expert}), ElementsAre(HasSubstr("transformers cannot")));
  EXPECT_THAT(LoaderNotes({*quant::ToModelOpt(*quant::PresetScheme("FP8_DYNAMIC"))}, {expert}),
              ElementsAre(AllOf(HasSubstr("transformers cannot"), Not(HasSubstr("vLLM loads"))), HasSubstr("vLLM cannot")));
}

}  // namespace
}  // namespace quern::daemon
