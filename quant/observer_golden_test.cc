// No group's error is above that of llm-compressor's observers, from tests/golden/observers.safetensors (its script says what is in it).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "quant/golden_file.h"
#include "quant/scalar/float_formats.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

constexpr double kTolerance = 1e-5;

double ValueAt(DType dtype, const std::string& bytes, int64_t index) {
  uint32_t bits = 0;
  const size_t size = BytesPerElement(dtype);
  std::memcpy(&bits, bytes.data() + index * size, size);
  if (dtype == DType::kBF16) return scalar::Bf16::ToFloat(static_cast<uint16_t>(bits));
  if (dtype == DType::kF16) return scalar::F16::ToFloat(static_cast<uint16_t>(bits));
  return scalar::FloatOf(bits);
}

template <class T>
std::vector<T> ValuesOf(const GoldenTensor& tensor) {
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

TEST(ObserverGoldenTest, NoGroupIsWorseThanTheReference) {
  const GoldenFile weights("integer_rtn.safetensors"), golden("observers.safetensors");
  int cases = 0, better = 0, groups_in_all = 0;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* shape : {"wide", "odd"}) {
      const std::string source = absl::StrCat(dtype, ".", shape);
      const TestWeight weight = weights.Weight(source + ".weight");
      const std::vector<float> importance = ValuesOf<float>(golden.Get(absl::StrCat("importance.", shape)));
      double mean = 0;
      for (const float value : importance) mean += value / static_cast<double>(importance.size());
      for (const int bits : {2, 3, 4, 8}) {
        for (const bool symmetric : {true, false}) {
          for (const int64_t group_size : {32, 128, 0}) {
            if (group_size != 0 && weight.shape.cols % group_size != 0) continue;
            for (const Observer observer : {Observer::kMse, Observer::kImportance}) {
              SchemeSpec spec;
              spec.num_bits = bits;
              spec.symmetric = symmetric;
              spec.strategy = group_size == 0 ? Strategy::kChannel : Strategy::kGroup;
              spec.group_size = group_size;
              spec.observer = observer;
              const std::string name =
                  absl::StrCat(source, ".w", bits, symmetric ? ".sym." : ".asym.", group_size == 0 ? "channel" : absl::StrCat(group_size),
                               observer == Observer::kMse ? ".mse" : ".importance");
              SCOPED_TRACE(name);
              const std::vector<double> expected = ValuesOf<double>(golden.Get(name));
              QUERN_ASSERT_OK_AND_ASSIGN(const Scheme* scheme, Scheme::For(spec));
              ModuleInputs inputs;
              inputs.importance = importance;
              QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(*scheme, weight, Tiling(), NonfinitePolicy::kFail, inputs));
              QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(*scheme, weight, encoded, Tiling()));
              const int64_t group = group_size == 0 ? weight.shape.cols : group_size;
              ASSERT_EQ(static_cast<int64_t>(expected.size()) * group, weight.shape.rows * weight.shape.cols);
              for (size_t index = 0; index < expected.size(); ++index) {
                double error = 0;
                for (int64_t i = 0; i < group; ++i) {
                  const int64_t element = static_cast<int64_t>(index) * group + i;
                  const double difference =
                      std::fabs(ValueAt(weight.dtype, decoded, element) - ValueAt(weight.dtype, weight.bytes, element));
                  error += observer == Observer::kMse
                               ? std::pow(difference, 2.4)
                               : difference * difference * difference * (importance[element % weight.shape.cols] / mean);
                }
                EXPECT_LE(error, expected[index] * (1 + kTolerance)) << "group " << index;
                better += error < expected[index] * (1 - kTolerance);
                ++groups_in_all;
              }
              ++cases;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 3 * 4 * 2 * 2 * (3 + 1));
  // The reference stops early, and rounds its sums to the weight's dtype.
  EXPECT_GT(better, groups_in_all / 50);
}

}  // namespace
}  // namespace quern::quant
