// Every SIMD target that this machine runs gives what the scalar definition gives, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hwy/targets.h"
#include "quant/kernels/float_tile.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

using scalar::FloatFormat;
using scalar::FloatScale;
using scalar::FloatScaling;

// Runs `test` with each target forced, then with none.
void ForEachTarget(const std::function<void()>& test) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    ASSERT_EQ(ActiveTarget(), hwy::TargetName(target));
    SCOPED_TRACE(ActiveTarget());
    test();
  }
  hwy::SetSupportedTargetsForTest(0);
}

ElementType ElementOf(DType dtype) {
  return dtype == DType::kBF16 ? ElementType::kBf16 : dtype == DType::kF16 ? ElementType::kF16 : ElementType::kF32;
}

struct Result {
  std::string codes, scales;
  std::vector<RowError> errors;
  scalar::Problem problem;
};

class Work {
 public:
  Work(DType dtype, const FloatFormat& format, int64_t rows, int64_t columns, int64_t group, const std::string& elements)
      : elements_(elements) {
    tile_.format = format;
    tile_.element = ElementOf(dtype);
    tile_.rows = rows;
    tile_.columns = columns;
    tile_.group = group;
    tile_.elements = reinterpret_cast<const unsigned char*>(elements_.data());
    tile_.element_stride = columns * BytesPerElement(dtype);
    tile_.code_stride = columns * format.bits / 8;
    tile_.scale_stride = (columns + group - 1) / group;
    tile_.set_scale = format.scaling == FloatScaling::kNvfp4 ? 300.0f : 0.003f;
    if (format.scaling == FloatScaling::kGiven) {
      // Scales of every row and group of their own, values of BF16; the multiplier is another one, as in ModelOpt's convention.
      for (int64_t i = 0; i < rows * tile_.scale_stride; ++i) {
        const float scale = std::ldexp(1.0f + static_cast<float>(i * 37 % 128) / 128, static_cast<int>(i % 7) - 12);
        given.push_back({scale, scale * 1.0078125f});
      }
      tile_.given_stride = tile_.scale_stride;
    }
  }

  Result Encode(bool use_scalar, bool replace = false) {
    Result result;
    result.codes.assign(tile_.rows * tile_.code_stride, '\xA5');
    result.scales.assign(tile_.rows * tile_.scale_stride, '\xA5');
    return EncodeInto(std::move(result), use_scalar, replace, false);
  }

  // With the scales of `chosen`.
  Result EncodeWith(bool use_scalar, const Result& chosen) {
    Result result;
    result.codes.assign(tile_.rows * tile_.code_stride, '\xA5');
    result.scales = chosen.scales;
    return EncodeInto(std::move(result), use_scalar, false, true);
  }

  std::string Decode(bool use_scalar, Result& result) {
    std::string decoded(elements_.size(), '\xA5');
    Point(result);
    (use_scalar ? DecodeFloatsScalar : DecodeFloats)(tile_, reinterpret_cast<unsigned char*>(decoded.data()), tile_.element_stride);
    return decoded;
  }

  // Per row and group, and of all rows together.
  std::vector<float> Observe(bool use_scalar) {
    std::vector<float> amax(tile_.rows * tile_.scale_stride), shared(tile_.scale_stride, 0.25f);
    (use_scalar ? ObserveAmaxScalar : ObserveAmax)(tile_, amax.data(), tile_.scale_stride);
    (use_scalar ? ObserveAmaxScalar : ObserveAmax)(tile_, shared.data(), 0);
    amax.insert(amax.end(), shared.begin(), shared.end());
    return amax;
  }

  std::vector<FloatScale> given;
  float& set_scale() { return tile_.set_scale; }

 private:
  Result EncodeInto(Result result, bool use_scalar, bool replace, bool scales_chosen) {
    result.errors.resize(tile_.rows);
    // Sums that were begun before, as over segments of a row.
    for (RowError& error : result.errors) {
      for (int lane = 0; lane < RowError::kLanes; ++lane) error.error[lane] = error.signal[lane] = lane / 3.0;
    }
    Point(result);
    FloatOptions options;
    options.errors = result.errors.data();
    options.replace_nonfinite = replace;
    options.scales_chosen = scales_chosen;
    result.problem = use_scalar ? EncodeFloatsScalar(tile_, options) : EncodeFloats(tile_, options);
    return result;
  }

  void Point(Result& result) {
    tile_.codes = reinterpret_cast<unsigned char*>(result.codes.data());
    tile_.scales = given.empty() ? reinterpret_cast<unsigned char*>(result.scales.data()) : nullptr;
    tile_.given = given.empty() ? nullptr : given.data();
  }

  const std::string elements_;
  FloatTile tile_;
};

void ExpectSame(const Result& actual, const Result& expected) {
  EXPECT_TRUE(actual.codes == expected.codes) << "codes differ";
  EXPECT_TRUE(actual.scales == expected.scales) << "scales differ";
  EXPECT_TRUE(SameErrors(actual.errors, expected.errors)) << "error figures differ";
  EXPECT_EQ(actual.problem.kind, expected.problem.kind);
  EXPECT_EQ(actual.problem.row, expected.problem.row);
  EXPECT_EQ(actual.problem.column, expected.problem.column);
}

std::vector<FloatFormat> Formats() {
  std::vector<FloatFormat> formats;
  for (const bool precise : {false, true}) {
    formats.push_back({8, FloatScaling::kGiven, precise, !precise});
    formats.push_back({4, FloatScaling::kNvfp4, precise, false});
    formats.push_back({4, FloatScaling::kModelOptNvfp4, precise, false});
    formats.push_back({4, FloatScaling::kMx, precise, !precise});
    formats.push_back({8, FloatScaling::kMx, precise, !precise});
  }
  return formats;
}

int64_t GroupOf(const FloatFormat& format, int64_t columns) {
  return format.scaling == FloatScaling::kGiven ? columns : format.scaling == FloatScaling::kMx ? 32 : 16;
}

std::string NameOf(DType dtype, const FloatFormat& format) {
  const char* scaling[] = {"given", "nvfp4", "modelopt nvfp4", "mx"};
  return absl::StrCat(std::string(DTypeName(dtype)), " float", format.bits, " ", scaling[static_cast<int>(format.scaling)],
                      format.precise ? " precise" : "");
}

TEST(FloatKernelsTest, EveryShapeEqualsTheDefinition) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const FloatFormat& format : Formats()) {
      SCOPED_TRACE(NameOf(dtype, format));
      for (const Shape2D shape : {Shape2D{3, 16}, Shape2D{5, 256}, Shape2D{2, 48}, Shape2D{3, 1008}, Shape2D{2, 4128}}) {
        if (format.scaling == FloatScaling::kMx && shape.cols % 32 != 0) continue;
        SCOPED_TRACE(absl::StrCat(shape.rows, " x ", shape.cols));
        const TestWeight weight = RandomWeight(dtype, shape, shape.cols + format.bits);
        Work work(dtype, format, shape.rows, shape.cols, GroupOf(format, shape.cols), weight.bytes);
        Result expected = work.Encode(true);
        ASSERT_EQ(expected.problem.kind, scalar::Problem::kNone);
        const std::string decoded = work.Decode(true, expected);
        const std::vector<float> amax = work.Observe(true);
        Result chosen = expected;
        for (char& byte : chosen.scales) byte = static_cast<char>((byte ^ 1) | 1);  // others, none of them 0 or NaN
        for (char& byte : chosen.scales) byte = static_cast<char>(byte & 0x7D);
        const Result other = work.EncodeWith(true, chosen);
        ForEachTarget([&] {
          Result actual = work.Encode(false);
          ExpectSame(actual, expected);
          EXPECT_TRUE(work.Decode(false, actual) == decoded) << "values differ";
          EXPECT_EQ(work.Observe(false), amax);
          ExpectSame(work.EncodeWith(false, chosen), other);
        });
      }
    }
  }
}

TEST(FloatKernelsTest, EveryLengthOfARowEqualsTheDefinition) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const bool precise : {false, true}) {
      const FloatFormat format = {8, FloatScaling::kGiven, precise, !precise};
      SCOPED_TRACE(NameOf(dtype, format));
      for (int64_t columns = 1; columns <= 300; columns += columns < 100 ? 1 : 23) {
        for (const int64_t group : {columns, int64_t{128}}) {
          SCOPED_TRACE(absl::StrCat(columns, " columns in groups of ", group));
          const TestWeight weight = RandomWeight(dtype, {2, columns}, columns);
          Work work(dtype, format, 2, columns, group, weight.bytes);
          Result expected = work.Encode(true);
          const std::string decoded = work.Decode(true, expected);
          const std::vector<float> amax = work.Observe(true);
          ForEachTarget([&] {
            Result actual = work.Encode(false);
            ExpectSame(actual, expected);
            EXPECT_TRUE(work.Decode(false, actual) == decoded) << "values differ";
            EXPECT_EQ(work.Observe(false), amax);
          });
        }
      }
    }
  }
}

// All finite values of a 16-bit dtype, by blocks of one magnitude (as they are stored) and mixed.
template <class D>
std::string AllFinite(bool mixed) {
  std::string bytes;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    uint16_t bits = static_cast<uint16_t>(mixed ? i * 40503u : i);
    if (!D::IsFinite(bits)) bits = static_cast<uint16_t>(bits & 0x83FF);
    bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits);
  }
  return bytes;
}

template <class D>
void EveryValueGivesTheSameCode(DType dtype) {
  for (const bool mixed : {false, true}) {
    const std::string elements = AllFinite<D>(mixed);
    for (const FloatFormat& format : Formats()) {
      SCOPED_TRACE(absl::StrCat(NameOf(dtype, format), mixed ? " mixed" : ""));
      Work work(dtype, format, 1, 0x10000, format.scaling == FloatScaling::kGiven ? 128 : GroupOf(format, 0), elements);
      for (const float set_scale : {1.0f, 2688.0f, 0x1.8p-120f, 0x1.23p100f}) {
        work.set_scale() = set_scale;
        SCOPED_TRACE(absl::StrCat("set scale ", set_scale));
        Result expected = work.Encode(true);
        const std::string decoded = work.Decode(true, expected);
        ForEachTarget([&] {
          ExpectSame(work.Encode(false), expected);
          EXPECT_TRUE(work.Decode(false, expected) == decoded) << "values differ";
        });
        if (format.scaling == FloatScaling::kGiven || format.scaling == FloatScaling::kMx) break;
      }
    }
  }
}

TEST(FloatKernelsTest, EveryBf16ValueGivesTheSameCode) { EveryValueGivesTheSameCode<scalar::Bf16>(DType::kBF16); }
TEST(FloatKernelsTest, EveryF16ValueGivesTheSameCode) { EveryValueGivesTheSameCode<scalar::F16>(DType::kF16); }

TEST(FloatKernelsTest, EveryCodeUnderEveryScaleDecodesAsTheDefinition) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const FloatFormat& format : Formats()) {
      SCOPED_TRACE(NameOf(dtype, format));
      // 256 groups, one a scale byte, NaN and 0 among them; codes count up.
      const int64_t group = format.scaling == FloatScaling::kGiven ? 256 : GroupOf(format, 0);
      const int64_t columns = 256 * group;
      Work work(dtype, format, 1, columns, group, std::string(columns * BytesPerElement(dtype), '\0'));
      Result damaged;
      for (int64_t i = 0; i < columns * format.bits / 8; ++i) damaged.codes.push_back(static_cast<char>(i * 11));
      for (int i = 0; i < 256; ++i) damaged.scales.push_back(static_cast<char>(i));
      const float special[] = {0, -0.0f, 1e-40f, 3e38f, -2.5f, std::numeric_limits<float>::infinity(), std::nanf("")};
      for (size_t i = 0; i < work.given.size(); ++i) {
        if (i % 3 == 0) work.given[i].multiplier = special[i / 3 % 7];
      }
      for (const float set_scale : {300.0f, 0x1.8p-140f, 0.0f, 2e38f, std::numeric_limits<float>::infinity()}) {
        work.set_scale() = set_scale;
        const std::string decoded = work.Decode(true, damaged);
        ForEachTarget([&] { EXPECT_TRUE(work.Decode(false, damaged) == decoded) << "set scale " << set_scale; });
      }
    }
  }
}

TEST(FloatKernelsTest, NonfiniteElementsEqualTheDefinition) {
  constexpr int64_t kRows = 3, kColumns = 4128;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const uint32_t inf = dtype == DType::kBF16 ? 0x7F80 : dtype == DType::kF16 ? 0x7C00 : 0x7F800000;
    const uint32_t sign = dtype == DType::kF32 ? 0x80000000 : 0x8000;
    const int64_t bytes = BytesPerElement(dtype);
    const TestWeight clean = RandomWeight(dtype, {kRows, kColumns}, 7);
    for (const FloatFormat& format : Formats()) {
      if (format.precise) continue;
      for (const uint32_t value : {inf, inf | sign, inf + 1, (inf + 1) | sign}) {
        for (const int64_t at : {int64_t{0}, int64_t{4100}, kRows * kColumns - 1}) {
          std::string elements = clean.bytes;
          std::memcpy(elements.data() + at * bytes, &value, bytes);
          SCOPED_TRACE(absl::StrCat(NameOf(dtype, format), " value ", value, " at ", at));
          Work work(dtype, format, kRows, kColumns, GroupOf(format, kColumns), elements);
          const Result replaced = work.Encode(true, true);
          EXPECT_EQ(replaced.problem.kind, scalar::Problem::kNone);
          EXPECT_EQ(replaced.errors[at / kColumns].nonfinite, 1u);
          const std::vector<float> amax = work.Observe(true);
          ForEachTarget([&] {
            const scalar::Problem problem = work.Encode(false, false).problem;
            EXPECT_EQ(problem.kind, (value & ~sign) == inf ? scalar::Problem::kInf : scalar::Problem::kNan);
            EXPECT_EQ(problem.row, at / kColumns);
            EXPECT_EQ(problem.column, at % kColumns);
            ExpectSame(work.Encode(false, true), replaced);
            EXPECT_EQ(work.Observe(false), amax);
          });
        }
      }
    }
  }
}

TEST(FloatKernelsTest, LeastErrorsEqualTheDefinition) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const bool precise : {false, true}) {
      for (const int64_t blocks : {1, 2, 3, 64, 65}) {
        TestWeight weight = RandomWeight(dtype, {1, blocks * 16}, blocks, /*unusual=*/false);
        // Not finite: an element of the last block.
        if (blocks == 65) std::memset(weight.bytes.data() + weight.bytes.size() - 4, 0xFF, 4);
        FloatTile tile;
        tile.format = {4, FloatScaling::kNvfp4, precise, false};
        tile.element = ElementOf(dtype);
        tile.rows = 1;
        tile.columns = blocks * 16;
        tile.group = 16;
        tile.elements = reinterpret_cast<const unsigned char*>(weight.bytes.data());
        tile.element_stride = static_cast<int64_t>(weight.bytes.size());
        std::vector<float> amax(blocks), expected(blocks), actual(blocks);
        ObserveAmaxScalar(tile, amax.data(), 0);
        for (const float global_scale : {1.0f, 300.0f, 0x1.3p-110f, 0x1.23p100f}) {
          SCOPED_TRACE(absl::StrCat(DTypeName(dtype), ", ", blocks, " blocks, global scale ", global_scale));
          tile.set_scale = global_scale;
          LeastErrorsScalar(tile, amax.data(), expected.data());
          ForEachTarget([&] {
            LeastErrors(tile, amax.data(), actual.data());
            EXPECT_EQ(std::memcmp(actual.data(), expected.data(), blocks * sizeof(float)), 0);
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace quern::quant
