#include "worker/pipeline/generate.h"

#include <string.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/status_matchers.h"

namespace quern::worker {
namespace {

using testing::HasSubstr;

quern::v1::GenerateUnit Unit(const std::string& dtype, std::vector<uint64_t> shape, const std::string& distribution = "normal") {
  quern::v1::GenerateUnit unit;
  unit.set_seed(42);
  unit.set_distribution(distribution);
  unit.set_standard_deviation(0.02);
  unit.mutable_output()->set_name("model.layers.0.mlp.up_proj.weight");
  unit.mutable_output()->set_dtype(dtype);
  uint64_t size = dtype == "F32" ? 4 : 2;
  for (const uint64_t dimension : shape) {
    unit.mutable_output()->add_shape(dimension);
    size *= dimension;
  }
  unit.mutable_output()->set_size(size);
  return unit;
}

std::string Fill(const Generator& generator, uint64_t first, uint64_t count) {
  std::string bytes(count * generator.element_size(), '\0');
  generator.Fill(first, count, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

TEST(GenerateTest, AnyPartEqualsTheWhole) {
  for (const char* dtype : {"BF16", "F16", "F32"}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const Generator generator, Generator::For(Unit(dtype, {37, 101})));
    const std::string whole = Fill(generator, 0, 37 * 101);
    std::mt19937 random(1);
    for (int i = 0; i < 200; ++i) {
      const uint64_t first = random() % (37 * 101);
      const uint64_t count = random() % (37 * 101 - first + 1);
      ASSERT_EQ(Fill(generator, first, count), whole.substr(first * generator.element_size(), count * generator.element_size()));
    }
  }
}

TEST(GenerateTest, FastLoopEqualsTheDefinition) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Generator generator, Generator::For(Unit("F32", {50, 1003})));
  const std::string bytes = Fill(generator, 0, 50 * 1003);
  for (uint64_t i = 0; i < 50 * 1003; ++i) {
    float value;
    memcpy(&value, bytes.data() + 4 * i, 4);
    ASSERT_EQ(value, generator.ValueAt(i)) << i;
  }
}

// A synthetic checkpoint is named by its seed: these digests never change, on any machine.
TEST(GenerateTest, GoldenDigests) {
  const auto digest = [](const char* dtype) {
    const Generator generator = Generator::For(Unit(dtype, {64, 96})).value();
    const std::string bytes = Fill(generator, 0, 64 * 96);
    return Xxh3Of(bytes.data(), bytes.size());
  };
  EXPECT_EQ(Xxh3Of(QuantileTable(), kQuantiles * sizeof(float)), 15709649219189659437u);
  EXPECT_EQ(digest("BF16"), 12548095271013564592u);
  EXPECT_EQ(digest("F16"), 805934741360417119u);
  EXPECT_EQ(digest("F32"), 18433367649904627535u);
}

TEST(GenerateTest, LooksLikeWeights) {
  constexpr uint64_t kRows = 256, kCols = 4096;
  QUERN_ASSERT_OK_AND_ASSIGN(const Generator generator, Generator::For(Unit("F32", {kRows, kCols})));
  double smallest = 1e9, largest = 0, sum = 0;
  uint64_t outliers = 0;
  for (uint64_t row = 0; row < kRows; ++row) {
    double square = 0;
    uint64_t ordinary = 0;
    for (uint64_t col = 0; col < kCols; ++col) {
      const double value = generator.ValueAt(row * kCols + col);
      sum += value;
      if (std::abs(value) > 0.02 * 1.5 * 3.9) {
        ++outliers;
      } else {
        square += value * value;
        ++ordinary;
      }
    }
    const double deviation = std::sqrt(square / ordinary);
    smallest = std::min(smallest, deviation);
    largest = std::max(largest, deviation);
  }
  // Channels between half and one and a half of the deviation, a mean of zero, about one outlier in 16384 (some are small all the same).
  EXPECT_NEAR(smallest, 0.01, 0.0015);
  EXPECT_NEAR(largest, 0.03, 0.0015);
  EXPECT_NEAR(sum / (kRows * kCols), 0, 1e-4);
  EXPECT_GT(outliers, 16);
  EXPECT_LT(outliers, 100);
}

TEST(GenerateTest, QuantilesAreThoseOfTheNormalDistribution) {
  const float* const table = QuantileTable();
  for (int q = 0; q < kQuantiles; ++q) {
    EXPECT_NEAR(0.5 * std::erfc(-table[q] / std::sqrt(2.0)), (q + 0.5) / kQuantiles, 1e-7);
    EXPECT_EQ(table[q], -table[kQuantiles - 1 - q]);
  }
}

TEST(GenerateTest, NamesAndSeedsGiveOtherValues) {
  quern::v1::GenerateUnit unit = Unit("BF16", {8, 8});
  const std::string first = Fill(Generator::For(unit).value(), 0, 64);
  unit.set_seed(43);
  EXPECT_NE(Fill(Generator::For(unit).value(), 0, 64), first);
  unit.set_seed(42);
  unit.mutable_output()->set_name("another");
  EXPECT_NE(Fill(Generator::For(unit).value(), 0, 64), first);
}

TEST(GenerateTest, RoundsToNearestEven) {
  // Every F16 value that is made is one of the two nearest, and the nearer one.
  QUERN_ASSERT_OK_AND_ASSIGN(const Generator generator, Generator::For(Unit("F16", {16, 1024})));
  const std::string bytes = Fill(generator, 0, 16 * 1024);
  for (uint64_t i = 0; i < 16 * 1024; ++i) {
    uint16_t bits;
    memcpy(&bits, bytes.data() + 2 * i, 2);
    const int exponent = (bits >> 10) & 31;
    const double magnitude = exponent == 0 ? std::ldexp(bits & 1023, -24) : std::ldexp(1024 + (bits & 1023), exponent - 25);
    const double unit = std::ldexp(1, std::max(exponent, 1) - 25);
    const double value = generator.ValueAt(i);
    ASSERT_LE(std::abs((bits & 0x8000 ? -magnitude : magnitude) - value), unit / 2) << value;
  }
}

TEST(GenerateTest, OnesAndZeros) {
  EXPECT_EQ(Fill(Generator::For(Unit("BF16", {3}, "ones")).value(), 0, 3), std::string("\x80\x3f\x80\x3f\x80\x3f", 6));
  EXPECT_EQ(Fill(Generator::For(Unit("F16", {2}, "ones")).value(), 0, 2), std::string("\x00\x3c\x00\x3c", 4));
  EXPECT_EQ(Fill(Generator::For(Unit("F32", {2}, "zeros")).value(), 0, 2), std::string(8, '\0'));
}

TEST(GenerateTest, UnknownThingsAreRefused) {
  EXPECT_THAT(Generator::For(Unit("BF16", {2}, "uniform")), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("uniform")));
  EXPECT_THAT(Generator::For(Unit("I32", {2})), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("I32")));
  quern::v1::GenerateUnit unit = Unit("BF16", {2, 2});
  unit.mutable_output()->set_size(9);
  EXPECT_THAT(Generator::For(unit), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("9 bytes")));
}

}  // namespace
}  // namespace quern::worker
