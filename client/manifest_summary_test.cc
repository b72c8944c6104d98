#include "client/manifest_summary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status_matchers.h"

namespace quern::client {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr char kManifest[] = R"({
  "format_version": 1,
  "numerics_version": 1,
  "recipe": "scheme: W4A16\n",
  "source_files": [{"name": "model.safetensors", "size": 999, "header_sha256": "00"}],
  "files": [{"name": "config.json", "size": 24, "sha256": "00"}, {"name": "model.safetensors", "size": 1000, "sha256": "00"}],
  "modules": [
    {"module": "a", "scheme": "int4", "source_shape": [2, 5], "error": {"count": 10, "sum_squared_error": 1, "sum_squares": 100, "max_abs_error": 0.5}},
    {"module": "b", "scheme": "int4", "error": {"count": 20, "sum_squared_error": 9, "sum_squares": 900, "max_abs_error": 0.25}},
    {"module": "c", "scheme": "int8", "error": {"count": 5, "sum_squared_error": 2, "sum_squares": 20, "max_abs_error": 0.125}},
    {"module": "zero", "scheme": "int8", "error": {"count": 5, "sum_squared_error": 0, "sum_squares": 0, "max_abs_error": 0}}
  ],
  "copied": [{"tensor": "norm.weight"}, {"tensor": "embed.weight"}],
  "dropped": [{"tensor": "old.scale", "reason": "replaced"}]
})";

TEST(ManifestSummaryTest, CountsAndSumsByScheme) {
  QUERN_ASSERT_OK_AND_ASSIGN(ManifestSummary summary, SummarizeManifest(kManifest, 2));
  EXPECT_EQ(summary.files, 2);
  EXPECT_EQ(summary.bytes, 1024);
  EXPECT_EQ(summary.copied, 2);
  EXPECT_EQ(summary.dropped, 1);
  ASSERT_THAT(summary.schemes, SizeIs(2));
  EXPECT_EQ(summary.schemes["int4"].modules, 2);
  EXPECT_EQ(summary.schemes["int4"].weights, 30);
  EXPECT_EQ(summary.schemes["int4"].sum_squared_error, 10);
  EXPECT_EQ(summary.schemes["int4"].sum_squares, 1000);
  EXPECT_EQ(summary.schemes["int4"].max_abs_error, 0.5);
}

TEST(ManifestSummaryTest, WorstModulesComeFirst) {
  QUERN_ASSERT_OK_AND_ASSIGN(ManifestSummary summary, SummarizeManifest(kManifest, 2));
  ASSERT_THAT(summary.worst, SizeIs(2));
  EXPECT_EQ(summary.worst[0].name, "c");
  EXPECT_EQ(summary.worst[1].name, "a");
  const std::string text = FormatManifestSummary(summary);
  EXPECT_THAT(text, HasSubstr("2 files, 1 KiB; 2 tensors copied, 1 dropped"));
  EXPECT_THAT(text, HasSubstr("20.0 dB"));
  EXPECT_THAT(text, HasSubstr("10.0 dB"));
}

TEST(ManifestSummaryTest, OtherJsonIsRefused) {
  EXPECT_THAT(SummarizeManifest("[]", 2), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT(SummarizeManifest("{}", 2), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT(SummarizeManifest("{\"format_version\": 1", 2), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT(SummarizeManifest(R"({"format_version": 1, "modules": [{"module": 7}]})", 2), StatusIs(absl::StatusCode::kDataLoss));
}

TEST(ManifestSummaryTest, NumbersThatJsonCannotWriteAreRead) {
  QUERN_ASSERT_OK_AND_ASSIGN(ManifestSummary summary, SummarizeManifest(R"({"format_version": 1, "modules": [
    {"module": "a", "scheme": "int4", "error": {"count": 1, "sum_squared_error": "inf", "sum_squares": 1, "max_abs_error": "inf"}}]})",
                                                                        2));
  EXPECT_EQ(summary.schemes["int4"].max_abs_error, std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace quern::client
