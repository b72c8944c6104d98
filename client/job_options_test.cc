#include "client/job_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "client/exit_code.h"

namespace quern::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Parsed {
  QuantizeOptions job;
  WorkerOptions worker;
};

// Parses as a shell would give it, without quoting.
Parsed Parse(std::vector<std::string> arguments) {
  Parsed parsed;
  CLI::App app;
  parsed.job.AddTo(app, /*output=*/true);
  parsed.worker.AddTo(app);
  std::reverse(arguments.begin(), arguments.end());
  app.parse(arguments);
  return parsed;
}

TEST(SplitPatternsTest, CommasSeparateExceptInRegularExpressions) {
  EXPECT_THAT(SplitPatterns({"attention, mlp", "routed_experts"}), ElementsAre("attention", "mlp", "routed_experts"));
  EXPECT_THAT(SplitPatterns({"re:a{1,2}", "mlp,re:b{3,4}"}), ElementsAre("re:a{1,2}", "mlp", "re:b{3,4}"));
  EXPECT_THAT(SplitPatterns({",, ,", ""}), IsEmpty());
}

TEST(JobOptionsTest, PatternsDoNotSwallowTheSource) {
  const Parsed parsed =
      Parse({"--scheme", "W4A16", "--targets", "attention", "org/name", "--targets", "mlp,lm_head", "--ignore", "re:x,y"});
  QUERN_ASSERT_OK_AND_ASSIGN(quern::v1::QuantizeSpec spec, parsed.job.ToSpec(false));
  EXPECT_EQ(spec.source(), "org/name");
  EXPECT_THAT(spec.targets(), ElementsAre("attention", "mlp", "lm_head"));
  EXPECT_THAT(spec.ignore(), ElementsAre("re:x,y"));
}

TEST(JobOptionsTest, EmptyValuesAreRefused) {
  for (const char* option : {"--scheme", "--group-size", "--observer", "--recipe", "--activation-scales", "--importance"}) {
    EXPECT_THROW(Parse({"org/name", "--scheme", "W4A16", option, ""}), CLI::ValidationError) << option;
  }
}

TEST(JobOptionsTest, EveryOptionReachesTheSpec) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("options"));
  const std::string recipe = directory.path() + "/recipe.yaml";
  QUERN_ASSERT_OK(WriteFileDurably(recipe, "scheme: W4A16\n"));
  const Parsed parsed = Parse({"org/name", "--recipe", recipe, "--group-size", "channel", "--max-shard-size", "2GB", "--overwrite",
                               "--verify-source", "--memory", "1GiB", "--threads", "3", "--reader", "mmap"});
  QUERN_ASSERT_OK_AND_ASSIGN(quern::v1::QuantizeSpec spec, parsed.job.ToSpec(false));
  EXPECT_EQ(spec.recipe(), "scheme: W4A16\n");
  EXPECT_EQ(spec.group_size(), "channel");
  EXPECT_EQ(spec.max_shard_size(), 2'000'000'000);
  EXPECT_TRUE(spec.overwrite());
  EXPECT_TRUE(spec.verify_source());
  EXPECT_EQ(spec.export_format(), "compressed-tensors");
  EXPECT_THAT(parsed.worker.MemoryBytes(), IsOkAndHolds(kGiB));
  EXPECT_EQ(parsed.worker.threads, 3);
  EXPECT_EQ(parsed.worker.reader, "mmap");
}

TEST(JobOptionsTest, FormatsAndFilesReachTheSpec) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("options"));
  const std::string scales = directory.path() + "/scales.safetensors", importance = directory.path() + "/importance.safetensors";
  QUERN_ASSERT_OK(WriteFileDurably(scales, ""));
  QUERN_ASSERT_OK(WriteFileDurably(importance, ""));
  const Parsed parsed = Parse({"org/name", "--scheme", "NVFP4", "--observer", "imatrix_mse", "--export", "modelopt", "--activation-scales",
                               scales, "--importance", importance, "--allow-requantize"});
  EXPECT_TRUE(parsed.job.SaysHow());
  QUERN_ASSERT_OK_AND_ASSIGN(quern::v1::QuantizeSpec spec, parsed.job.ToSpec(false));
  EXPECT_EQ(spec.observer(), "imatrix_mse");
  EXPECT_EQ(spec.export_format(), "modelopt");
  EXPECT_EQ(spec.activation_scales(), scales);
  EXPECT_EQ(spec.importance(), importance);
  EXPECT_TRUE(spec.allow_requantize());
  EXPECT_THROW(Parse({"org/name", "--scheme", "NVFP4", "--export", "gguf"}), CLI::ParseError);
  const Parsed missing = Parse({"org/name", "--scheme", "NVFP4", "--activation-scales", "/nowhere/scales"});
  EXPECT_THAT(missing.job.ToSpec(false), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--activation-scales")));
  EXPECT_THAT(missing.job.ToSpec(/*remote=*/true), IsOk()) << "the coordinator may see it";
}

TEST(JobOptionsTest, DequantizeOptionsReachTheSpec) {
  DequantizeOptions options;
  CLI::App app;
  options.AddTo(app);
  std::vector<std::string> arguments = {"--verify-source", "--overwrite", "1GiB", "--max-shard-size", "F32", "--dtype", "org/name"};
  app.parse(arguments);  // reversed, as CLI11 wants it
  QUERN_ASSERT_OK_AND_ASSIGN(quern::v1::DequantizeSpec spec, options.ToSpec(false));
  EXPECT_EQ(spec.source(), "org/name");
  EXPECT_EQ(spec.dtype(), "F32");
  EXPECT_EQ(spec.max_shard_size(), kGiB);
  EXPECT_TRUE(spec.overwrite());
  EXPECT_TRUE(spec.verify_source());
  EXPECT_EQ(DequantizeOptions{.source = "a/b"}.ToSpec(false)->dtype(), "BF16");
}

TEST(JobOptionsTest, DefaultsAreTheDocumentedOnes) {
  const Parsed parsed = Parse({"org/name", "--scheme", "W4A16"});
  QUERN_ASSERT_OK_AND_ASSIGN(quern::v1::QuantizeSpec spec, parsed.job.ToSpec(false));
  EXPECT_EQ(spec.max_shard_size(), 2 * kGiB);
  EXPECT_FALSE(spec.overwrite());
  EXPECT_THAT(parsed.worker.MemoryBytes(), IsOkAndHolds(512 * kMiB));
  EXPECT_EQ(parsed.worker.reader, "auto");
}

TEST(JobOptionsTest, MistakesAreUsageErrors) {
  const auto exit_code = [](std::vector<std::string> arguments) {
    return ExitCodeOf(Parse(std::move(arguments)).job.ToSpec(false).status());
  };
  EXPECT_EQ(exit_code({"org/name"}), ExitCode::kUsage);
  EXPECT_EQ(exit_code({"org/name", "--scheme", "W4A16", "--group-size", "0"}), ExitCode::kUsage);
  EXPECT_EQ(exit_code({"org/name", "--scheme", "W4A16", "--group-size", "-32"}), ExitCode::kUsage);
  EXPECT_EQ(exit_code({"org/name", "--scheme", "W4A16", "--max-shard-size", "2 apples"}), ExitCode::kUsage);
  EXPECT_EQ(exit_code({"org/name", "--scheme", "W4A16", "--max-shard-size", "0"}), ExitCode::kUsage);
  EXPECT_THAT(Parse({"org/name", "--memory", "much"}).worker.MemoryBytes(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--memory")));
}

TEST(JobOptionsTest, RecipeThatIsNoUtf8IsAUsageError) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("options"));
  const std::string recipe = directory.path() + "/recipe.yaml";
  QUERN_ASSERT_OK(WriteFileDurably(recipe, "scheme: W4A16 # \xFF\n"));
  const absl::Status status = Parse({"org/name", "--recipe", recipe}).job.ToSpec(false).status();
  EXPECT_EQ(ExitCodeOf(status), ExitCode::kUsage);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--recipe")));
}

TEST(JobOptionsTest, MemoryThatNoTaskRunsWithIsRefused) {
  EXPECT_THAT(Parse({"org/name", "--memory", "16MiB"}).worker.MemoryBytes(), IsOkAndHolds(16 * kMiB));
  EXPECT_EQ(ExitCodeOf(Parse({"org/name", "--memory", "15MiB"}).worker.MemoryBytes().status()), ExitCode::kUsage);
}

TEST(JobOptionsTest, WhatTheDiskLacksIsNoUsageError) {
  EXPECT_EQ(ExitCodeOf(Parse({"/no/such", "--scheme", "W4A16"}).job.ToSpec(false).status()), ExitCode::kFailed);
  EXPECT_EQ(ExitCodeOf(Parse({"org/name", "--recipe", "/no/such.yaml"}).job.ToSpec(false).status()), ExitCode::kFailed);
}

TEST(JobOptionsTest, UnknownReaderAndNoSourceAreRefused) {
  EXPECT_THROW(Parse({"org/name", "--reader", "telepathy"}), CLI::ValidationError);
  EXPECT_THROW(Parse({"--scheme", "W4A16"}), CLI::RequiredError);
  EXPECT_THROW(Parse({"org/name", "--threads", "0"}), CLI::ValidationError);
}

TEST(JobOptionsTest, FractionsAreSharesOrNumbers) {
  for (const auto& [text, value] :
       std::vector<std::pair<std::string, double>>{{"1%", 0.01}, {"0.01", 0.01}, {"0", 0}, {"100%", 1}, {"1", 1}, {"0.5%", 0.005}}) {
    EXPECT_THAT(ParseFraction("--audit", text), IsOkAndHolds(testing::DoubleEq(value))) << text;
  }
  for (const char* text : {"", "%", "2", "101%", "-1%", "nan", "inf", "1 percent"}) {
    EXPECT_EQ(ExitCodeOf(ParseFraction("--audit", text).status()), ExitCode::kUsage) << text;
  }
}

}  // namespace
}  // namespace quern::client
