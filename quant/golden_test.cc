// Byte parity with llm-compressor and compressed-tensors, from tests/golden/integer_rtn.safetensors (its script says what is in it).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status_matchers.h"
#include "quant/golden_file.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

// Where two byte strings first differ, for messages.
std::string Difference(const std::string& actual, const std::string& expected) {
  if (actual.size() != expected.size()) return absl::StrCat(actual.size(), " bytes, expected ", expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] != expected[i]) return absl::StrCat("byte ", i, " is ", actual[i] & 0xFF, ", expected ", expected[i] & 0xFF);
  }
  return "equal";
}

// Encodes `weight` by `spec` and compares everything with the tensors whose names begin with `prefix`.
void Compare(const GoldenFile& golden, const TestWeight& weight, const SchemeSpec& spec, const std::string& prefix) {
  SCOPED_TRACE(prefix);
  QUERN_ASSERT_OK_AND_ASSIGN(const Scheme* scheme, Scheme::For(spec));
  QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(*scheme, weight, Tiling()));
  for (size_t i = 0; i < encoded.regions.size(); ++i) {
    const Region& region = encoded.regions[i];
    const GoldenTensor& expected = golden.Get(prefix + region.suffix);
    EXPECT_EQ(region.dtype, expected.dtype) << region.suffix;
    EXPECT_EQ(region.shape, expected.shape) << region.suffix;
    EXPECT_EQ(Difference(encoded.data[i], expected.bytes), "equal") << region.suffix;
  }
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(*scheme, weight, encoded, Tiling()));
  EXPECT_EQ(HexDigest(Sha256Of(decoded)), HexDigest(golden.Get(prefix + "decoded_sha256").bytes));
  std::string figures;
  for (const RowError& error : encoded.errors) {
    const double row[] = {error.SumSquaredError(), error.SumSquares(), error.max_abs};
    figures.append(reinterpret_cast<const char*>(row), sizeof row);
    EXPECT_EQ(error.nonfinite, 0u);
  }
  EXPECT_EQ(Difference(figures, golden.Get(prefix + "errors").bytes), "equal") << "error figures";
  // Nothing else is stored there.
  const auto begin = golden.tensors().lower_bound(prefix), end = golden.tensors().lower_bound(prefix + "\x7F");
  EXPECT_EQ(static_cast<size_t>(std::distance(begin, end)), encoded.regions.size() + 2);
}

TEST(GoldenTest, BytesValuesAndErrorsEqualTheReference) {
  const std::pair<const char*, SchemeSpec> strategies[] = {
      {"32", {.strategy = Strategy::kGroup, .group_size = 32}},
      {"128", {.strategy = Strategy::kGroup, .group_size = 128}},
      {"channel", {.strategy = Strategy::kChannel, .group_size = 0}},
      {"tensor", {.strategy = Strategy::kTensor, .group_size = 0}},
  };
  const GoldenFile golden("integer_rtn.safetensors");
  int cases = 0;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* shape : {"wide", "odd"}) {
      const std::string source = absl::StrCat(dtype, ".", shape);
      const TestWeight weight = golden.Weight(source + ".weight");
      for (int bits = 2; bits <= 8; ++bits) {
        for (const bool symmetric : {true, false}) {
          for (auto [name, spec] : strategies) {
            if (spec.group_size != 0 && weight.shape.cols % spec.group_size != 0) continue;
            spec.num_bits = bits;
            spec.symmetric = symmetric;
            const std::string end = absl::StrCat(symmetric ? ".sym." : ".asym.", name, ".");
            Compare(golden, weight, spec, absl::StrCat(source, ".w", bits, end));
            ++cases;
            if ((bits != 4 && bits != 8) || spec.group_size == 128) continue;
            spec.activations = Activations::kInt8Token;
            Compare(golden, weight, spec, absl::StrCat(source, ".w", bits, "a8", end));
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 3 * (7 * 2 * (4 + 2) + 2 * 2 * (3 + 2)));
}

}  // namespace
}  // namespace quern::quant
