#include "daemon/manifest/manifest.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/digest.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

ManifestModule Module(const std::string& name) {
  ManifestModule module;
  module.module = name;
  module.scheme = "int4 asymmetric group 32";
  module.source_tensor = name + ".weight";
  module.source_file = "model-00001-of-00002.safetensors";
  module.source_dtype = "BF16";
  module.source_shape = {64, 128};
  module.source_digest = Xxh3_128Of(name);
  module.shard = "model.safetensors";
  module.role = "routed_experts";
  module.reason = "target routed_experts";
  module.error.set_module(name);
  module.error.set_count(64 * 128);
  module.error.set_sum_squared_error(0.1);
  module.error.set_sum_squares(3.0);
  module.error.set_max_abs_error(1e-300);
  module.error.set_nonfinite(2);
  return module;
}

Manifest Example() {
  Manifest manifest;
  manifest.numerics_version = 3;
  manifest.recipe = "scheme: W4A16\ntargets: [\"re:.*\\\\.mlp\"]\n";
  manifest.export_format = "compressed-tensors";
  manifest.max_shard_size = std::numeric_limits<uint64_t>::max();
  manifest.source_files = {{"model-00001-of-00002.safetensors", 10, Sha256Of("a")}, {"model-00002-of-00002.safetensors", 0, Sha256Of("b")}};
  manifest.inputs = {{"importance.safetensors", 12, Sha256Of("i")}};
  manifest.files = {{"code/tokenizer \"x\".py", 7, Sha256Of("c")}, {"model.safetensors", 1, Sha256Of("d")}};
  manifest.modules = {Module("layers.0.gate"), Module("layers.0.üp")};
  manifest.copied = {{"norm.weight", "model-00001-of-00002.safetensors", Xxh3_128Of("n"), "model.safetensors", "norms", "not 2-D"}};
  manifest.dropped = {{"layers.0.scale_inv", "decoded into the weight"}};
  return manifest;
}

TEST(ManifestTest, RoundTripGivesTheSameText) {
  const std::string text = ManifestToJson(Example());
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(text, "m"));
  EXPECT_EQ(ManifestToJson(parsed), text);
  EXPECT_EQ(parsed.recipe, Example().recipe);
  EXPECT_EQ(parsed.max_shard_size, Example().max_shard_size);
  ASSERT_THAT(parsed.modules, SizeIs(2));
  EXPECT_EQ(parsed.modules[1].module, "layers.0.üp");
  EXPECT_EQ(parsed.modules[1].source_shape, (std::vector<uint64_t>{64, 128}));
  EXPECT_EQ(parsed.modules[1].error.SerializeAsString(), Example().modules[1].error.SerializeAsString());
  ASSERT_THAT(parsed.files, SizeIs(2));
  EXPECT_EQ(parsed.files[0].name, "code/tokenizer \"x\".py");
  EXPECT_EQ(parsed.files[0].sha256, Sha256Of("c"));
  ASSERT_THAT(parsed.copied, SizeIs(1));
  EXPECT_EQ(parsed.copied[0].source_digest, Xxh3_128Of("n"));
  EXPECT_EQ(parsed.copied[0].role, "norms");
  ASSERT_THAT(parsed.dropped, SizeIs(1));
  EXPECT_EQ(parsed.dropped[0].reason, "decoded into the weight");
  ASSERT_THAT(parsed.inputs, SizeIs(1));
  EXPECT_EQ(parsed.inputs[0].sha256, Sha256Of("i"));
  ASSERT_THAT(parsed.source_files, SizeIs(2));
  EXPECT_EQ(parsed.source_files[0].size, 10u);
}

TEST(ManifestTest, PlacesInStacksRoundTrip) {
  Manifest manifest = Example();
  manifest.modules[1].stack = {"layers.0.experts.gate_up_proj", 4096, 2, 256};
  const std::string text = ManifestToJson(manifest);
  EXPECT_THAT(text,
              HasSubstr("\"stack\":{\"tensor\":\"layers.0.experts.gate_up_proj\",\"offset\":4096,\"row_stride\":2,\"col_stride\":256}"));
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(text, "m"));
  EXPECT_EQ(ManifestToJson(parsed), text);
  EXPECT_FALSE(parsed.modules[0].stack.has_value());
  ASSERT_TRUE(parsed.modules[1].stack.has_value());
  EXPECT_EQ(parsed.modules[1].stack->offset, 4096u);
  EXPECT_EQ(parsed.modules[1].stack->col_stride, 256u);
  EXPECT_THAT(ParseManifest(absl::StrReplaceAll(text, {{"\"row_stride\":2", "\"row_stride\":-2"}}), "m"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("stack: \"row_stride\" is no unsigned integer")));
  EXPECT_THAT(ParseManifest(absl::StrReplaceAll(text, {{"\"offset\":4096,", ""}}), "m"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("\"offset\" is missing")));
}

TEST(ManifestTest, EmptyListsRoundTrip) {
  const std::string text = ManifestToJson(Manifest());
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(text, "m"));
  EXPECT_EQ(ManifestToJson(parsed), text);
  EXPECT_EQ(text.back(), '\n');
}

TEST(ManifestTest, EntriesStandOnOneLineEach) {
  const std::string text = ManifestToJson(Example());
  int modules = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (line.find("\"module\":") == absl::string_view::npos) continue;
    ++modules;
    EXPECT_THAT(std::string(line), HasSubstr("\"max_abs_error\":1e-300"));
  }
  EXPECT_EQ(modules, 2);
}

TEST(ManifestTest, DoublesReadBackBitForBit) {
  std::mt19937_64 random(7);
  Manifest manifest;
  std::vector<double> values = {0.0,
                                -0.0,
                                5e-324,
                                std::numeric_limits<double>::max(),
                                std::numeric_limits<double>::min(),
                                3.0,
                                std::numeric_limits<double>::infinity(),
                                -std::numeric_limits<double>::infinity(),
                                0.1 + 0.2};
  while (values.size() < 5000) {
    const double value = std::bit_cast<double>(random());
    if (!std::isnan(value)) values.push_back(value);
  }
  for (double value : values) {
    manifest.modules.push_back(Module("m"));
    manifest.modules.back().error.set_sum_squared_error(value);
  }
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(ManifestToJson(manifest), "m"));
  ASSERT_THAT(parsed.modules, SizeIs(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint64_t>(parsed.modules[i].error.sum_squared_error()), std::bit_cast<uint64_t>(values[i])) << values[i];
  }
}

TEST(ManifestTest, NotANumberReadsBack) {
  Manifest manifest;
  manifest.modules.push_back(Module("m"));
  manifest.modules.back().error.set_max_abs_error(std::numeric_limits<double>::quiet_NaN());
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(ManifestToJson(manifest), "m"));
  EXPECT_TRUE(std::isnan(parsed.modules[0].error.max_abs_error()));
}

TEST(ManifestTest, HundredThousandTensors) {
  Manifest manifest;
  for (int i = 0; i < 100'000; ++i)
    manifest.modules.push_back(Module(absl::StrCat("model.layers.", i / 768, ".mlp.experts.", i % 768, ".up_proj")));
  manifest.files = Example().files;
  const std::string text = ManifestToJson(manifest);
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(text, "m"));
  ASSERT_THAT(parsed.modules, SizeIs(100'000));
  EXPECT_EQ(parsed.modules.back().module, manifest.modules.back().module);
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<ManifestFile> files, ParseManifestFiles(text, "m"));
  EXPECT_THAT(files, SizeIs(2));
}

TEST(ManifestTest, WhatIsMissingIsNamed) {
  const std::string text = ManifestToJson(Example());
  const auto without = [&](const std::string& key) { return absl::StrReplaceAll(text, {{absl::StrCat("\"", key, "\":"), "\"x\":"}}); };
  for (const char* key : {"format_version",
                          "numerics_version",
                          "export_format",
                          "max_shard_size",
                          "recipe",
                          "source_files",
                          "files",
                          "modules",
                          "copied",
                          "dropped",
                          "name",
                          "size",
                          "sha256",
                          "header_sha256",
                          "module",
                          "role",
                          "scheme",
                          "reason",
                          "shard",
                          "source_tensor",
                          "source_file",
                          "source_dtype",
                          "source_shape",
                          "source_digest",
                          "error",
                          "count",
                          "sum_squared_error",
                          "sum_squares",
                          "max_abs_error",
                          "nonfinite",
                          "tensor"}) {
    EXPECT_THAT(ParseManifest(without(key), "OUT/m.json"),
                StatusIs(absl::StatusCode::kDataLoss, testing::AllOf(HasSubstr("OUT/m.json"), HasSubstr(absl::StrCat("\"", key, "\"")))))
        << key;
  }
}

TEST(ManifestTest, AnotherTypeIsNamedWithItsPlace) {
  const std::string text = ManifestToJson(Example());
  const auto with = [&](const char* from, const char* to) { return ParseManifest(absl::StrReplaceAll(text, {{from, to}}), "m"); };
  EXPECT_THAT(with("\"size\":7", "\"size\":-7"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("files[0]: \"size\" is no unsigned integer")));
  EXPECT_THAT(with("[64,128]", "[64,1.5]"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("modules[0]: \"source_shape\"")));
  EXPECT_THAT(with("[64,128]", "64"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is no list")));
  EXPECT_THAT(with("\"sum_squares\":3.0", "\"sum_squares\":null"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("error: \"sum_squares\"")));
  EXPECT_THAT(with("\"sum_squares\":3.0", "\"sum_squares\":\"many\""), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is no number")));
  EXPECT_THAT(with("\"role\":\"norms\"", "\"role\":1"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("copied[0]: \"role\"")));
  EXPECT_THAT(with("\"dropped\": [", "\"dropped\": [1,"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("\"dropped\" is no list of objects")));
  EXPECT_THAT(with("\"dropped\": [", "\"files\": [], \"dropped\": ["), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("twice")));
}

TEST(ManifestTest, TruncatedOrForeignTextIsDataLoss) {
  const std::string text = ManifestToJson(Example());
  for (size_t size = 0; size + 2 < text.size(); size += 11) {
    EXPECT_THAT(ParseManifest(text.substr(0, size), "m"), StatusIs(absl::StatusCode::kDataLoss)) << size;
  }
  for (const char* other : {"[]", "[[{}]]", "3", "null", "\"x\"", "{\"modules\": {\"a\": {}}}"}) {
    EXPECT_THAT(ParseManifest(other, "m"), StatusIs(absl::StatusCode::kDataLoss)) << other;
  }
}

TEST(ManifestTest, NamesThatLeadOutAreRefused) {
  for (const char* name : {"../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a/"}) {
    Manifest manifest;
    manifest.files = {{name, 1, Sha256Of("")}};
    EXPECT_THAT(ParseManifestFiles(ManifestToJson(manifest), "m"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("plain relative path")))
        << name;
  }
}

TEST(ManifestTest, NewerVersionIsRefused) {
  Manifest manifest;
  manifest.format_version = 2;
  EXPECT_THAT(ParseManifest(ManifestToJson(manifest), "m"), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("newer Quern")));
}

TEST(ManifestTest, BrokenUtf8DoesNotThrow) {
  Manifest manifest;
  manifest.dropped = {{"a\xff", "b"}};
  EXPECT_THAT(ParseManifest(ManifestToJson(manifest), "m"), IsOk());
}

TEST(ManifestWriterTest, PiecesGiveTheSameTextAndOrderIsChecked) {
  const Manifest example = Example();
  std::string text;
  ManifestWriter writer([&](absl::string_view piece) {
    absl::StrAppend(&text, piece);
    return absl::OkStatus();
  });
  EXPECT_THAT(writer.Finish(), StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(writer.Add(example.modules[0]), StatusIs(absl::StatusCode::kFailedPrecondition));
  QUERN_ASSERT_OK(writer.Begin(example));
  for (const ManifestModule& module : example.modules) QUERN_ASSERT_OK(writer.Add(module));
  QUERN_ASSERT_OK(writer.Add(example.copied[0]));
  EXPECT_THAT(writer.Add(example.modules[0]), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("out of order")));
  QUERN_ASSERT_OK(writer.Add(example.dropped[0]));
  QUERN_ASSERT_OK(writer.Finish());
  EXPECT_EQ(text, ManifestToJson(example));
}

TEST(ManifestWriterTest, ErrorsOfTheSinkAreReturned) {
  ManifestWriter writer([](absl::string_view) { return absl::ResourceExhaustedError("disk full"); });
  EXPECT_THAT(writer.Begin(Example()), StatusIs(absl::StatusCode::kResourceExhausted, "disk full"));
}

}  // namespace
}  // namespace quern::daemon
