// No group's error is above that of llm-compressor's observers, from tests/golden/observers.safetensors (its script says what is in it).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "quant/golden_file.h"
#include "quant/scalar/float_formats.h"
#include "quant/scalar/float_rtn.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"
#include "quant/tile_support.h"

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

std::vector<float> ImportanceOf(const GoldenFile& golden, const std::string& shape) {
  return ValuesOf<float>(golden.Get("importance." + shape));
}

// The error of elements [begin, begin + count), in F64 with the observer's own norm; `importance` has one value a column.
double ErrorOf(Observer observer, const TestWeight& weight, const std::string& decoded, int64_t begin, int64_t count,
               const std::vector<float>& importance) {
  double mean = 0, error = 0;
  for (const float value : importance) mean += value / static_cast<double>(importance.size());
  for (int64_t i = begin; i < begin + count; ++i) {
    const double difference = std::fabs(ValueAt(weight.dtype, decoded, i) - ValueAt(weight.dtype, weight.bytes, i));
    error += observer == Observer::kMse ? std::pow(difference, 2.4)
                                        : difference * difference * difference * (importance[i % weight.shape.cols] / mean);
  }
  return error;
}

// Encodes and decodes.
absl::StatusOr<std::string> Through(const SchemeSpec& spec, const TestWeight& weight, const std::vector<float>& importance,
                                    EncodedWeight* encoded) {
  QUERN_ASSIGN_OR_RETURN(const Scheme* scheme, Scheme::For(spec));
  ModuleInputs inputs;
  inputs.importance = importance;
  QUERN_ASSIGN_OR_RETURN(*encoded, EncodeWeight(*scheme, weight, Tiling(), NonfinitePolicy::kFail, inputs));
  return DecodeWeight(*scheme, weight, *encoded, Tiling());
}

TEST(ObserverGoldenTest, NoGroupOfIntegersIsWorseThanTheReference) {
  const GoldenFile weights("integer_rtn.safetensors"), golden("observers.safetensors");
  int cases = 0, better = 0, groups_in_all = 0;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* shape : {"wide", "odd"}) {
      const std::string source = absl::StrCat(dtype, ".", shape);
      const TestWeight weight = weights.Weight(source + ".weight");
      const std::vector<float> importance = ImportanceOf(golden, shape);
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
              EncodedWeight encoded;
              QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, Through(spec, weight, importance, &encoded));
              const int64_t group = group_size == 0 ? weight.shape.cols : group_size;
              ASSERT_EQ(static_cast<int64_t>(expected.size()) * group, weight.shape.rows * weight.shape.cols);
              for (size_t index = 0; index < expected.size(); ++index) {
                const double error = ErrorOf(observer, weight, decoded, static_cast<int64_t>(index) * group, group, importance);
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

class FloatObserverGoldenTest : public testing::TestWithParam<std::tuple<const char*, const char*, Observer>> {
 protected:
  FloatObserverGoldenTest() : weights_("integer_rtn.safetensors"), golden_("observers.safetensors") {
    const auto [dtype, shape, observer] = GetParam();
    source_ = absl::StrCat(dtype, ".", shape);
    suffix_ = observer == Observer::kMse ? ".mse" : ".importance";
    const bool wide = absl::string_view(shape) == "wide";
    weight_ = (wide ? weights_ : golden_).Weight(source_ + ".weight");
    importance_ = ImportanceOf(golden_, "wide");
    importance_.resize(weight_.shape.cols);
  }

  const GoldenFile weights_, golden_;
  std::string source_, suffix_;
  TestWeight weight_;
  std::vector<float> importance_;
};

TEST_P(FloatObserverGoldenTest, NoRowOfFp8IsWorseThanTheReference) {
  const Observer observer = std::get<2>(GetParam());
  SchemeSpec spec = *PresetScheme("FP8_DYNAMIC");
  spec.observer = observer;
  const std::vector<double> expected = ValuesOf<double>(golden_.Get(source_ + ".fp8" + suffix_));
  EncodedWeight encoded;
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, Through(spec, weight_, importance_, &encoded));
  ASSERT_EQ(static_cast<int64_t>(expected.size()), weight_.shape.rows);
  for (int64_t row = 0; row < weight_.shape.rows; ++row) {
    EXPECT_LE(ErrorOf(observer, weight_, decoded, row * weight_.shape.cols, weight_.shape.cols, importance_),
              expected[row] * (1 + kTolerance))
        << "row " << row;
  }
}

TEST_P(FloatObserverGoldenTest, NoBlockOfNvfp4IsWorseThanTheReferenceAtTheSameGlobalScale) {
  const Observer observer = std::get<2>(GetParam());
  SchemeSpec spec = *PresetScheme("NVFP4A16");
  spec.observer = observer;
  const std::vector<float> chosen = ValuesOf<float>(golden_.Get(source_ + ".nvfp4" + suffix_));
  EncodedWeight encoded;
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, Through(spec, weight_, importance_, &encoded));
  ASSERT_EQ(static_cast<int64_t>(chosen.size()) * 16, weight_.shape.rows * weight_.shape.cols);
  ASSERT_EQ(encoded.regions[2].suffix, "weight_global_scale");
  float global_scale;
  std::memcpy(&global_scale, encoded.data[2].data(), sizeof global_scale);
  scalar::FloatFormat format;
  format.bits = 4;
  format.scaling = scalar::FloatScaling::kNvfp4;
  double total = 0;
  for (size_t index = 0; index < chosen.size(); ++index) {
    // The block with the scale that follows from what the reference chose.
    std::string reference = weight_.bytes;
    WithFormat(*ElementTypeOf(weight_.dtype), [&](auto d) {
      using D = decltype(d);
      const uint8_t byte = scalar::ScaleByte<D>(format, global_scale, chosen[index]);
      const scalar::FloatScale scale = scalar::ScaleOf(format, global_scale, byte);
      for (size_t i = index * 16; i < index * 16 + 16; ++i) {
        const float x = static_cast<float>(ValueAt(weight_.dtype, weight_.bytes, static_cast<int64_t>(i)));
        const auto bits = scalar::DequantizeFloat<D>(format, scale, scalar::QuantizeFloat<D>(format, scale, x));
        std::memcpy(reference.data() + i * sizeof bits, &bits, sizeof bits);
      }
    });
    const int64_t begin = static_cast<int64_t>(index) * 16;
    const double error = ErrorOf(observer, weight_, decoded, begin, 16, importance_);
    EXPECT_LE(error, ErrorOf(observer, weight_, reference, begin, 16, importance_) * (1 + kTolerance)) << "block " << index;
    total += error;
  }
  // The reference moves the global scale to what it chose; so does this observer, to what is best.
  if (observer == Observer::kMse) {
    EXPECT_LE(total, ValuesOf<double>(golden_.Get(source_ + ".nvfp4" + suffix_ + ".total")).at(0));
  }
}

INSTANTIATE_TEST_SUITE_P(All, FloatObserverGoldenTest,
                         testing::Combine(testing::Values("bf16", "f16", "f32"), testing::Values("wide", "normal", "rows", "equal"),
                                          testing::Values(Observer::kMse, Observer::kImportance)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param), "_", std::get<1>(info.param), "_",
                                               std::get<2>(info.param) == Observer::kMse ? "mse" : "importance");
                         });

// Where there are few blocks, any scale of F32 can be met by the global one: each row is a tensor of its own.
TEST(ObserverGoldenTest, NoTinyTensorOfNvfp4IsWorseThanTheReference) {
  const GoldenFile golden("observers.safetensors");
  SchemeSpec spec = *PresetScheme("NVFP4A16");
  spec.observer = Observer::kMse;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const int64_t columns : {16, 64, 256}) {
      const std::string name = absl::StrCat(dtype, ".tiny", columns);
      const TestWeight all = golden.Weight(name + ".weight");
      const std::vector<double> totals = ValuesOf<double>(golden.Get(name + ".totals"));
      ASSERT_EQ(static_cast<int64_t>(totals.size()), all.shape.rows);
      ASSERT_EQ(all.shape.cols, columns);
      double ours = 0, theirs = 0;
      for (int64_t row = 0; row < all.shape.rows; ++row) {
        TestWeight weight = all;
        weight.shape.rows = 1;
        const int64_t bytes = columns * BytesPerElement(all.dtype);
        weight.bytes = all.bytes.substr(row * bytes, bytes);
        EncodedWeight encoded;
        QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, Through(spec, weight, {}, &encoded));
        const double error = ErrorOf(Observer::kMse, weight, decoded, 0, columns, {});
        EXPECT_TRUE(std::isfinite(error)) << name << " row " << row;
        if (!std::isfinite(totals[row])) continue;  // the reference overflows F16
        EXPECT_LE(error, totals[row] * (1 + kTolerance)) << name << " row " << row;
        ours += error / totals[row];
        theirs += 1;
      }
      EXPECT_LT(ours, theirs) << name;
    }
  }
}

TEST(ObserverGoldenTest, NoBlockOfFp8IsWorseThanTheReference) {
  const GoldenFile golden("observers.safetensors");
  SchemeSpec spec = *PresetScheme("FP8_BLOCK");
  spec.observer = Observer::kMse;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    const TestWeight weight = golden.Weight(absl::StrCat(dtype, ".block.weight"));
    const std::vector<double> expected = ValuesOf<double>(golden.Get(absl::StrCat(dtype, ".block.fp8_block.mse")));
    EncodedWeight encoded;
    QUERN_ASSERT_OK_AND_ASSIGN(const Scheme* const scheme, Scheme::For(spec));
    const Tiling bands = {128, 0};
    QUERN_ASSERT_OK_AND_ASSIGN(encoded, EncodeWeight(*scheme, weight, bands));
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(*scheme, weight, encoded, bands));
    const int64_t across = weight.shape.cols / 128;
    ASSERT_EQ(static_cast<int64_t>(expected.size()), weight.shape.rows / 128 * across);
    for (size_t block = 0; block < expected.size(); ++block) {
      double error = 0;
      for (int64_t row = 0; row < 128; ++row) {
        const int64_t at =
            (static_cast<int64_t>(block) / across * 128 + row) * weight.shape.cols + static_cast<int64_t>(block) % across * 128;
        error += ErrorOf(Observer::kMse, weight, decoded, at, 128, {});
      }
      EXPECT_LE(error, expected[block] * (1 + kTolerance)) << dtype << " block " << block;
    }
  }
}

// Each block has the scale of the least squared error of all.
TEST(SweepTest, NoOtherScaleIsBetter) {
  for (const bool modelopt : {false, true}) {
    SchemeSpec spec = *PresetScheme("NVFP4A16");
    if (modelopt) spec = *ToModelOpt(spec);
    const TestWeight weight = RandomWeight(DType::kBF16, {3, 64}, 9);
    EncodedWeight plain, swept;
    QUERN_ASSERT_OK(Through(spec, weight, {}, &plain).status());
    spec.observer = Observer::kSweep;
    QUERN_ASSERT_OK(Through(spec, weight, {}, &swept).status());
    EXPECT_EQ(swept.data[2], plain.data[2]);  // the global scale stays
    float set_scale;
    std::memcpy(&set_scale, swept.data[2].data(), sizeof set_scale);
    scalar::FloatFormat format;
    format.bits = 4;
    format.scaling = modelopt ? scalar::FloatScaling::kModelOptNvfp4 : scalar::FloatScaling::kNvfp4;
    int changed = 0;
    for (int64_t block = 0; block < 3 * 4; ++block) {
      const auto error_of = [&](uint8_t byte) {
        const scalar::FloatScale scale = scalar::ScaleOf(format, set_scale, byte);
        double error = 0;
        for (int64_t i = block * 16; i < block * 16 + 16; ++i) {
          const float x = static_cast<float>(ValueAt(DType::kBF16, weight.bytes, i));
          const float y = scalar::Bf16::ToFloat(
              scalar::DequantizeFloat<scalar::Bf16>(format, scale, scalar::QuantizeFloat<scalar::Bf16>(format, scale, x)));
          error += static_cast<double>(y - x) * static_cast<double>(y - x);
        }
        return error;
      };
      const auto byte = static_cast<uint8_t>(swept.data[1][block]);
      const double error = error_of(byte);
      if (error == 0) continue;  // a block of zeros keeps its scale
      for (int other = 1; other < 127; ++other) {
        EXPECT_LE(error, error_of(static_cast<uint8_t>(other)) * (1 + kTolerance)) << "block " << block << ", scale " << other;
      }
      changed += swept.data[1][block] != plain.data[1][block];
    }
    EXPECT_GT(changed, 0);
  }
}

}  // namespace
}  // namespace quern::quant
