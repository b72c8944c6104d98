// Every SIMD target that this machine runs gives what the scalar definition gives, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "hwy/targets.h"
#include "quant/kernels/integer_tile.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

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

struct Result {
  std::string packed, scales, zero_points;
  std::vector<RowError> errors;
  scalar::Problem problem;
};

class Work {
 public:
  Work(DType dtype, const scalar::IntegerFormat& format, int64_t rows, int64_t columns, int64_t group, const std::string& elements)
      : elements_(elements) {
    tile_.format = format;
    tile_.element = dtype == DType::kBF16 ? ElementType::kBf16 : dtype == DType::kF16 ? ElementType::kF16 : ElementType::kF32;
    tile_.rows = rows;
    tile_.columns = columns;
    tile_.group = group;
    tile_.first_row = 64;
    bytes_ = BytesPerElement(dtype);
    tile_.elements = reinterpret_cast<const unsigned char*>(elements_.data());
    tile_.element_stride = columns * bytes_;
    tile_.packed_stride = scalar::PackedBytes(columns, format.bits);
    tile_.scale_stride = columns / group * bytes_;
    tile_.zero_point_stride = columns / group * 4;
  }

  Result Encode(bool use_scalar, bool replace = false, const scalar::Range* fixed = nullptr) {
    Result result;
    result.packed.assign(tile_.rows * tile_.packed_stride, '\xA5');
    result.scales.assign(tile_.rows * tile_.scale_stride, '\xA5');
    result.zero_points.assign((tile_.rows * tile_.format.bits + 31) / 32 * tile_.zero_point_stride, '\0');
    result.errors.resize(tile_.rows);
    // Sums that were begun before, as over segments of a row.
    for (RowError& error : result.errors) {
      for (int lane = 0; lane < RowError::kLanes; ++lane) error.error[lane] = error.signal[lane] = lane / 3.0;
    }
    Point(result);
    EncodeOptions options;
    options.errors = result.errors.data();
    options.replace_nonfinite = replace;
    options.fixed = fixed;
    result.problem = use_scalar ? EncodeScalar(tile_, options) : quant::Encode(tile_, options);
    return result;
  }

  std::string Decode(bool use_scalar, Result& result) {
    std::string decoded(elements_.size(), '\xA5');
    Point(result);
    (use_scalar ? DecodeScalar : quant::Decode)(tile_, reinterpret_cast<unsigned char*>(decoded.data()), tile_.element_stride);
    return decoded;
  }

  std::vector<RowError> Errors(bool use_scalar, const std::string& decoded) {
    std::vector<RowError> errors(tile_.rows);
    (use_scalar ? AddErrorsScalar : quant::AddErrors)(tile_, reinterpret_cast<const unsigned char*>(decoded.data()), tile_.element_stride,
                                                      errors.data());
    return errors;
  }

  std::vector<scalar::Range> Observe(bool use_scalar) {
    std::vector<scalar::Range> ranges(tile_.rows);
    (use_scalar ? ObserveScalar : quant::Observe)(tile_, ranges.data());
    return ranges;
  }

 private:
  void Point(Result& result) {
    tile_.packed = reinterpret_cast<unsigned char*>(result.packed.data());
    tile_.scales = reinterpret_cast<unsigned char*>(result.scales.data());
    tile_.zero_points = reinterpret_cast<unsigned char*>(result.zero_points.data());
  }

  const std::string elements_;
  int64_t bytes_;
  IntegerTile tile_;
};

void ExpectSame(const Result& actual, const Result& expected) {
  EXPECT_TRUE(actual.packed == expected.packed) << "codes differ";
  EXPECT_TRUE(actual.scales == expected.scales) << "scales differ";
  EXPECT_TRUE(actual.zero_points == expected.zero_points) << "zero points differ";
  EXPECT_TRUE(SameErrors(actual.errors, expected.errors)) << "error figures differ";
  EXPECT_EQ(actual.problem.kind, expected.problem.kind);
  EXPECT_EQ(actual.problem.row, expected.problem.row);
  EXPECT_EQ(actual.problem.column, expected.problem.column);
}

std::vector<scalar::IntegerFormat> Formats(const std::vector<int>& widths) {
  std::vector<scalar::IntegerFormat> formats;
  for (const int bits : widths) {
    for (const bool symmetric : {true, false}) {
      for (const bool precise : {true, false}) formats.push_back({bits, symmetric, precise});
    }
  }
  return formats;
}

std::string NameOf(DType dtype, const scalar::IntegerFormat& format) {
  return absl::StrCat(std::string(DTypeName(dtype)), " int", format.bits, format.symmetric ? " symmetric" : " asymmetric",
                      format.precise ? " precise" : "");
}

TEST(IntegerKernelsTest, ListsTheTargetsThatRan) {
  std::string names;
  ForEachTarget([&] { absl::StrAppend(&names, names.empty() ? "" : " ", ActiveTarget()); });
  RecordProperty("targets", names);
  std::cout << "targets: " << names << "\n";
  EXPECT_FALSE(names.empty());
}

TEST(IntegerKernelsTest, EveryShapeEqualsTheDefinition) {
  struct Shape {
    int64_t rows, columns, group;
  };
  const Shape shapes[] = {{5, 256, 32}, {3, 384, 128}, {2, 4352, 32}, {3, 96, 96}, {2, 48, 16}, {2, 120, 40}, {1, 1, 1}};
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const scalar::IntegerFormat& format : Formats({2, 3, 4, 5, 6, 7, 8})) {
      SCOPED_TRACE(NameOf(dtype, format));
      for (const Shape& shape : shapes) {
        SCOPED_TRACE(absl::StrCat(shape.rows, " x ", shape.columns, " in groups of ", shape.group));
        const TestWeight weight = RandomWeight(dtype, {shape.rows, shape.columns}, shape.columns + format.bits);
        Work work(dtype, format, shape.rows, shape.columns, shape.group, weight.bytes);
        Result expected = work.Encode(true);
        ASSERT_EQ(expected.problem.kind, scalar::Problem::kNone);
        const std::string decoded = work.Decode(true, expected);
        const std::vector<RowError> errors = work.Errors(true, decoded);
        ForEachTarget([&] {
          Result actual = work.Encode(false);
          ExpectSame(actual, expected);
          EXPECT_TRUE(work.Decode(false, actual) == decoded) << "values differ";
          EXPECT_TRUE(SameErrors(work.Errors(false, decoded), errors)) << "figures of the values differ";
        });
      }
    }
  }
}

TEST(IntegerKernelsTest, EveryLengthOfARowEqualsTheDefinition) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const scalar::IntegerFormat& format : Formats({3, 4, 8})) {
      SCOPED_TRACE(NameOf(dtype, format));
      for (int64_t columns = 1; columns <= 100; ++columns) {
        SCOPED_TRACE(absl::StrCat(columns, " columns"));
        const TestWeight weight = RandomWeight(dtype, {2, columns}, columns);
        Work work(dtype, format, 2, columns, columns, weight.bytes);
        Result expected = work.Encode(true);
        const std::string decoded = work.Decode(true, expected);
        const std::vector<RowError> errors = work.Errors(true, decoded);
        const std::vector<scalar::Range> ranges = work.Observe(true);
        ForEachTarget([&] {
          Result actual = work.Encode(false);
          ExpectSame(actual, expected);
          EXPECT_TRUE(work.Decode(false, actual) == decoded) << "values differ";
          EXPECT_TRUE(SameErrors(work.Errors(false, decoded), errors)) << "figures of the values differ";
          const std::vector<scalar::Range> observed = work.Observe(false);
          for (size_t row = 0; row < ranges.size(); ++row) {
            EXPECT_EQ(observed[row].low, ranges[row].low);
            EXPECT_EQ(observed[row].high, ranges[row].high);
          }
        });
      }
    }
  }
}

// All finite values of a 16-bit dtype as one row.
template <class D>
std::string AllFinite() {
  std::string bytes;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    if (D::IsFinite(bits)) bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits);
  }
  return bytes;
}

template <class D>
void EveryValueGivesTheSameCode(DType dtype) {
  const std::string elements = AllFinite<D>();
  const int64_t columns = static_cast<int64_t>(elements.size() / 2);
  // Ranges whose scales have many significands, over the exponents of the dtype.
  std::vector<scalar::Range> ranges;
  for (int i = 0; i < 12; ++i) {
    const float high = D::Round(std::ldexp(1.0f + static_cast<float>(i * 37 % 128) / 128, i * 2 - 14));
    ranges.push_back({-D::Round(high * static_cast<float>(i % 5) / 4), high});
  }
  ranges.push_back({0, D::ToFloat(1)});
  ranges.push_back({-D::ToFloat(0x0123), D::ToFloat(0x0456)});
  ranges.push_back({0, D::kLargest});
  for (const int bits : {2, 4, 8}) {
    for (const bool symmetric : {true, false}) {
      const scalar::IntegerFormat format = {bits, symmetric, false};
      SCOPED_TRACE(NameOf(dtype, format));
      Work work(dtype, format, 1, columns, columns, elements);
      for (const scalar::Range& range : ranges) {
        SCOPED_TRACE(absl::StrCat("range ", range.low, " to ", range.high));
        const Result expected = work.Encode(true, false, &range);
        ForEachTarget([&] { ExpectSame(work.Encode(false, false, &range), expected); });
      }
    }
  }
}

TEST(IntegerKernelsTest, EveryBf16ValueGivesTheSameCode) { EveryValueGivesTheSameCode<scalar::Bf16>(DType::kBF16); }
TEST(IntegerKernelsTest, EveryF16ValueGivesTheSameCode) { EveryValueGivesTheSameCode<scalar::F16>(DType::kF16); }

// What the BF16 kernel relies on: for scales from 2^-100 to 2^100, multiplying by the reciprocal rounds to the same BF16 value as dividing,
// for quotients of every significand that are normal F32 values.
TEST(IntegerKernelsTest, MultiplyingByTheReciprocalEqualsDividing) {
  using scalar::Bf16;
  for (const int scale_exponent : {-100, -99, -60, -1, 0, 1, 60, 99, 100}) {
    for (int scale_significand = 0; scale_significand < 128; ++scale_significand) {
      const float scale = std::ldexp(1.0f + static_cast<float>(scale_significand) / 128, scale_exponent);
      if (scale > 0x1p100f) continue;
      const float reciprocal = 1.0f / scale;
      // Quotients from 2^-20, where they count as nothing, to 2^10, beyond every code; and the ends of the exponents.
      for (const int quotient_exponent : {-124, -60, -20, -10, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 60, 120}) {
        const int exponent = scale_exponent + quotient_exponent;
        if (exponent < -126 || exponent > 127) continue;
        for (int significand = 0; significand < 128; ++significand) {
          const float x = std::ldexp(1.0f + static_cast<float>(significand) / 128, exponent);
          ASSERT_EQ(Bf16::FromFloat(x * reciprocal), Bf16::FromFloat(x / scale)) << x << " by " << scale;
          ASSERT_EQ(Bf16::FromFloat(-x * reciprocal), Bf16::FromFloat(-x / scale)) << -x << " by " << scale;
        }
      }
    }
  }
}

TEST(IntegerKernelsTest, NonfiniteElementsEqualTheDefinition) {
  constexpr int64_t kRows = 3, kColumns = 4352;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const uint32_t inf = dtype == DType::kBF16 ? 0x7F80 : dtype == DType::kF16 ? 0x7C00 : 0x7F800000;
    const uint32_t sign = dtype == DType::kF32 ? 0x80000000 : 0x8000;
    const int64_t bytes = BytesPerElement(dtype);
    const TestWeight clean = RandomWeight(dtype, {kRows, kColumns}, 7);
    for (const uint32_t value : {inf, inf | sign, inf + 1, (inf + 1) | sign}) {
      for (const int64_t at : {int64_t{0}, int64_t{4200}, kRows * kColumns - 1}) {
        std::string elements = clean.bytes;
        std::memcpy(elements.data() + at * bytes, &value, bytes);
        for (const int64_t group : {int64_t{32}, kColumns}) {
          const scalar::IntegerFormat format = {4, true, false};
          SCOPED_TRACE(absl::StrCat(NameOf(dtype, format), " value ", value, " at ", at, " group ", group));
          Work work(dtype, format, kRows, kColumns, group, elements);
          const Result replaced = work.Encode(true, true);
          EXPECT_EQ(replaced.problem.kind, scalar::Problem::kNone);
          EXPECT_EQ(replaced.errors[at / kColumns].nonfinite, 1u);
          const std::vector<scalar::Range> ranges = work.Observe(true);
          const std::vector<RowError> errors = work.Errors(true, clean.bytes);
          // The other way round, as where a stored file is damaged.
          Work reverse(dtype, format, kRows, kColumns, group, clean.bytes);
          const std::vector<RowError> reversed = reverse.Errors(true, elements);
          EXPECT_FALSE(std::isfinite(reversed[at / kColumns].SumSquaredError()));
          ForEachTarget([&] {
            const scalar::Problem problem = work.Encode(false, false).problem;
            EXPECT_EQ(problem.kind, (value & ~sign) == inf ? scalar::Problem::kInf : scalar::Problem::kNan);
            EXPECT_EQ(problem.row, at / kColumns);
            EXPECT_EQ(problem.column, at % kColumns);
            ExpectSame(work.Encode(false, true), replaced);
            const std::vector<scalar::Range> observed = work.Observe(false);
            for (size_t row = 0; row < ranges.size(); ++row) {
              EXPECT_EQ(observed[row].low, ranges[row].low);
              EXPECT_EQ(observed[row].high, ranges[row].high);
            }
            EXPECT_TRUE(SameErrors(work.Errors(false, clean.bytes), errors));
            EXPECT_TRUE(SameErrors(reverse.Errors(false, elements), reversed));
          });
        }
      }
    }
  }
}

TEST(IntegerKernelsTest, OverflowingRangesEqualTheDefinition) {
  TestWeight weight = RandomWeight(DType::kF16, {2, 128}, 3);
  const uint16_t ends[] = {0x7BFF, 0xFBFF};
  std::memcpy(weight.bytes.data() + (128 + 70) * 2, ends, sizeof ends);
  for (const int64_t group : {32, 128}) {
    Work work(DType::kF16, {4, false, false}, 2, 128, group, weight.bytes);
    const Result replaced = work.Encode(true, true);
    EXPECT_EQ(replaced.problem.kind, scalar::Problem::kNone);
    ForEachTarget([&] {
      const scalar::Problem problem = work.Encode(false, false).problem;
      EXPECT_EQ(problem.kind, scalar::Problem::kOverflow);
      EXPECT_EQ(problem.row, 1);
      EXPECT_EQ(problem.column, group == 32 ? 64 : 0);
      ExpectSame(work.Encode(false, true), replaced);
    });
  }
}

TEST(IntegerKernelsTest, DamagedScalesDecodeAsTheDefinition) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const uint32_t inf = dtype == DType::kBF16 ? 0x7F80 : dtype == DType::kF16 ? 0x7C00 : 0x7F800000;
    for (const uint32_t value : {inf, inf + 1, uint32_t{1}, inf - 1}) {
      Work work(dtype, {4, true, false}, 1, 96, 32, RandomWeight(dtype, {1, 96}, 5).bytes);
      Result result = work.Encode(true);
      std::memcpy(result.scales.data() + BytesPerElement(dtype), &value, BytesPerElement(dtype));
      const std::string decoded = work.Decode(true, result);
      ForEachTarget([&] { EXPECT_TRUE(work.Decode(false, result) == decoded) << DTypeName(dtype) << " scale " << value; });
    }
  }
}

}  // namespace
}  // namespace quern::quant
