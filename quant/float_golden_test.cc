// Byte parity of the float formats with compressed-tensors and ModelOpt, from tests/golden/float_rtn.safetensors (its script says what is
// in it).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

struct Tensor {
  DType dtype;
  std::vector<uint64_t> shape;
  std::string bytes;
};

std::map<std::string, Tensor> ReadGolden() {
  std::map<std::string, Tensor> tensors;
  const absl::StatusOr<std::string> file = ReadFileToString("tests/golden/float_rtn.safetensors");
  if (!file.ok()) return tensors;
  uint64_t size;
  std::memcpy(&size, file->data(), sizeof size);
  const nlohmann::json header = nlohmann::json::parse(file->substr(8, size));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const uint64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensors[name] = {ParseDType(std::string(entry["dtype"])).value(), entry["shape"], file->substr(8 + size + begin, end - begin)};
  }
  return tensors;
}

constexpr struct {
  const char* name;
  const char* spec;
} kSchemes[] = {
    {"fp8_tensor", "float8 tensor symmetric observer=minmax numerics=reference"},
    {"fp8_channel", "float8 channel symmetric observer=minmax numerics=reference activations=fp8_token"},
    {"fp8_block", "float8 block=128 symmetric observer=minmax numerics=reference activations=fp8_group128"},
    {"nvfp4", "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3"},
    {"nvfp4_set", "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3"},
    {"mxfp4", "float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0"},
    {"mxfp8", "float8 group=32 symmetric observer=minmax numerics=reference scale=e8m0"},
    {"modelopt_fp8", "float8 tensor symmetric observer=minmax numerics=reference scale=f32 convention=modelopt"},
    {"modelopt_fp8_channel",
     "float8 channel symmetric observer=minmax numerics=reference scale=f32 activations=fp8_token convention=modelopt"},
    {"modelopt_nvfp4", "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 convention=modelopt"},
};

TEST(FloatGoldenTest, BytesValuesAndErrorsEqualTheLibraries) {
  const std::map<std::string, Tensor> golden = ReadGolden();
  const auto weight_of = [&](const std::string& name) {
    const Tensor& tensor = golden.at(name + ".weight");
    TestWeight weight;
    weight.dtype = tensor.dtype;
    weight.shape = {static_cast<int64_t>(tensor.shape.at(0)), static_cast<int64_t>(tensor.shape.at(1))};
    weight.bytes = tensor.bytes;
    return weight;
  };
  int cases = 0;
  size_t digests = 0;
  for (const std::string dtype : {"bf16", "f16", "f32"}) {
    for (const std::string shape : {"wide", "block", "odd", "row"}) {
      ASSERT_TRUE(golden.count(absl::StrCat(dtype, ".", shape, ".weight")));
      const TestWeight weight = weight_of(absl::StrCat(dtype, ".", shape));
      for (const auto& [name, text] : kSchemes) {
        const std::string prefix = absl::StrCat(dtype, ".", shape, ".", name, ".");
        const auto expected = [&](const std::string& suffix) {
          const auto found = golden.find(prefix + suffix);
          if (found == golden.end()) return std::string("no such tensor");
          ++digests;
          return HexDigest(found->second.bytes);
        };
        if (!golden.count(prefix + "decoded")) continue;
        SCOPED_TRACE(prefix);
        QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec spec, SchemeSpec::Parse(text));
        QUERN_ASSERT_OK_AND_ASSIGN(const Scheme* scheme, Scheme::For(spec));
        std::vector<TestWeight> others;
        if (absl::EndsWith(name, "_set")) {
          for (const std::string member : {"wide", "block", "row"}) {
            if (member != shape) others.push_back(weight_of(absl::StrCat(dtype, ".", member)));
          }
        }
        QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(*scheme, weight, {128, 0}, NonfinitePolicy::kFail, {}, others));
        for (size_t i = 0; i < encoded.regions.size(); ++i) {
          EXPECT_EQ(HexDigest(Sha256Of(encoded.data[i])), expected(encoded.regions[i].suffix)) << encoded.regions[i].suffix;
        }
        QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(*scheme, weight, encoded, {128, 0}));
        EXPECT_EQ(HexDigest(Sha256Of(decoded)), expected("decoded"));
        std::string figures;
        for (const RowError& error : encoded.errors) {
          const double row[] = {error.SumSquaredError(), error.SumSquares(), error.max_abs};
          figures.append(reinterpret_cast<const char*>(row), sizeof row);
          EXPECT_EQ(error.nonfinite, 0u);
        }
        EXPECT_EQ(HexDigest(Sha256Of(figures)), expected("errors")) << "error figures";
        ++cases;
      }
    }
  }
  // Every digest of the file was compared.
  EXPECT_EQ(digests + 3 * 4, golden.size());
  EXPECT_GT(cases, 80);
}

}  // namespace
}  // namespace quern::quant
