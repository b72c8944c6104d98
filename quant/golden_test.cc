// Byte parity with llm-compressor and compressed-tensors, from tests/golden/integer_rtn.safetensors (its script says what is in it).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

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
  const absl::StatusOr<std::string> file = ReadFileToString("tests/golden/integer_rtn.safetensors");
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

class GoldenTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { golden_ = new std::map<std::string, Tensor>(ReadGolden()); }
  static const Tensor& Get(const std::string& name) {
    const auto found = golden_->find(name);
    if (found == golden_->end()) {
      ADD_FAILURE() << "no tensor " << name << " in tests/golden/integer_rtn.safetensors";
      static const Tensor empty = {};
      return empty;
    }
    return found->second;
  }
  static TestWeight Weight(const std::string& name) {
    const Tensor& tensor = Get(name + ".weight");
    TestWeight weight;
    weight.dtype = tensor.dtype;
    weight.shape = {static_cast<int64_t>(tensor.shape.at(0)), static_cast<int64_t>(tensor.shape.at(1))};
    weight.bytes = tensor.bytes;
    return weight;
  }

  static const std::map<std::string, Tensor>* golden_;
};
const std::map<std::string, Tensor>* GoldenTest::golden_ = nullptr;

// Where two byte strings first differ, for messages.
std::string Difference(const std::string& actual, const std::string& expected) {
  if (actual.size() != expected.size()) return absl::StrCat(actual.size(), " bytes, expected ", expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] != expected[i]) return absl::StrCat("byte ", i, " is ", actual[i] & 0xFF, ", expected ", expected[i] & 0xFF);
  }
  return "equal";
}

TEST_F(GoldenTest, BytesValuesAndErrorsEqualTheReference) {
  int cases = 0;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* shape : {"wide", "odd"}) {
      const std::string source = absl::StrCat(dtype, ".", shape);
      const TestWeight weight = Weight(source);
      for (int bits = 2; bits <= 8; ++bits) {
        for (const bool symmetric : {true, false}) {
          for (const int64_t group : {32, 128, 0}) {
            if (group != 0 && weight.shape.cols % group != 0) continue;
            SchemeSpec spec;
            spec.num_bits = bits;
            spec.symmetric = symmetric;
            spec.strategy = group == 0 ? Strategy::kChannel : Strategy::kGroup;
            spec.group_size = group;
            const std::string prefix =
                absl::StrCat(source, ".w", bits, symmetric ? ".sym." : ".asym.", group == 0 ? "channel" : absl::StrCat(group), ".");
            SCOPED_TRACE(prefix);
            QUERN_ASSERT_OK_AND_ASSIGN(const Scheme* scheme, Scheme::For(spec));
            QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(*scheme, weight, Tiling()));
            ASSERT_EQ(encoded.regions.size(), symmetric ? 3u : 4u);
            for (size_t i = 0; i < encoded.regions.size(); ++i) {
              const Region& region = encoded.regions[i];
              ASSERT_EQ(region.suffix.substr(0, 7), "weight_");
              const Tensor& expected = Get(prefix + region.suffix.substr(7));
              EXPECT_EQ(region.dtype, expected.dtype) << region.suffix;
              EXPECT_EQ(region.shape, expected.shape) << region.suffix;
              EXPECT_EQ(Difference(encoded.data[i], expected.bytes), "equal") << region.suffix;
            }
            QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(*scheme, weight, encoded, Tiling()));
            EXPECT_EQ(HexDigest(Sha256Of(decoded)), HexDigest(Get(prefix + "decoded_sha256").bytes));
            std::string figures;
            for (const RowError& error : encoded.errors) {
              const double row[] = {error.SumSquaredError(), error.SumSquares(), error.max_abs};
              figures.append(reinterpret_cast<const char*>(row), sizeof row);
              EXPECT_EQ(error.nonfinite, 0u);
            }
            EXPECT_EQ(Difference(figures, Get(prefix + "errors").bytes), "equal") << "error figures";
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 3 * 7 * 2 * 4);
}

}  // namespace
}  // namespace quern::quant
