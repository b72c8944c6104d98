#include "daemon/planner/loader_notes.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

TEST(LoaderNotes, ExpertsThatLoad) {
  for (const char* name : {"W3A16", "W4A16", "W5A16", "W8A16", "FP8_DYNAMIC", "MXFP4A16"})
    EXPECT_THAT(NotesOfExperts(name), IsEmpty()) << name;
}

TEST(LoaderNotes, ExpertsThatDoNot) {
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
              ElementsAre(HasSubstr("transformers cannot"), HasSubstr("vLLM cannot")));
}

}  // namespace
}  // namespace quern::daemon
