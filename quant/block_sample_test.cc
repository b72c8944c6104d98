#include "quant/block_sample.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "quant/scalar/float_formats.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

scalar::FloatFormat Format() {
  scalar::FloatFormat format;
  format.bits = 4;
  format.scaling = scalar::FloatScaling::kNvfp4;
  return format;
}

FloatTile TileOf(const TestWeight& weight, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
  FloatTile tile;
  tile.format = Format();
  tile.element = weight.dtype == DType::kF32 ? ElementType::kF32 : ElementType::kBf16;
  tile.rows = row_end - row_begin;
  tile.columns = col_end - col_begin;
  tile.group = 16;
  const int64_t size = BytesPerElement(weight.dtype);
  tile.element_stride = weight.shape.cols * size;
  tile.elements = reinterpret_cast<const unsigned char*>(weight.bytes.data()) + row_begin * tile.element_stride + col_begin * size;
  return tile;
}

// The total over all blocks at a global scale.
double TotalAt(const TestWeight& weight, float global_scale) {
  double total = 0;
  const int64_t blocks = weight.shape.cols / 16;
  std::vector<float> amax(blocks), errors(blocks);
  for (int64_t row = 0; row < weight.shape.rows; ++row) {
    FloatTile one = TileOf(weight, row, row + 1, 0, weight.shape.cols);
    one.set_scale = global_scale;
    std::fill(amax.begin(), amax.end(), 0.0f);
    ObserveAmax(one, amax.data(), 0);
    LeastErrors(one, amax.data(), errors.data());
    for (int64_t block = 0; block < blocks; ++block) {
      if (amax[block] != 0) total += static_cast<double>(errors[block]) * scalar::BlockWeight(amax[block]);
    }
  }
  return total;
}

TEST(BlockSampleTest, OrderOfTilesAndMergesDoesNotMatter) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const TestWeight weight = RandomWeight(dtype, {96, 1024}, 3);
    BlockSample whole;
    float amax = 0;
    whole.Observe(TileOf(weight, 0, 96, 0, 1024), 0, 0, &amax);
    const float expected = whole.BestGlobalScale(Format(), amax);
    EXPECT_GT(expected, 0);
    for (uint64_t seed = 0; seed < 5; ++seed) {
      std::mt19937_64 random(seed);
      std::vector<std::pair<int64_t, int64_t>> tiles;  // row, column; 1 x 256
      for (int64_t row = 0; row < 96; ++row) {
        for (int64_t column = 0; column < 1024; column += 256) tiles.emplace_back(row, column);
      }
      std::shuffle(tiles.begin(), tiles.end(), random);
      BlockSample parts[3];
      float largest = 0;
      for (const auto& [row, column] : tiles) {
        parts[random() % 3].Observe(TileOf(weight, row, row + 1, column, column + 256), row, column / 16, &largest);
      }
      parts[2].Merge(parts[0]);
      parts[2].Merge(parts[1]);
      EXPECT_EQ(largest, amax);
      EXPECT_EQ(parts[2].BestGlobalScale(Format(), largest), expected);
    }
  }
}

// A sixth of the blocks decide as all of them would, where the choice makes a difference.
TEST(BlockSampleTest, SampleDecidesAlmostAsWellAsAllBlocks) {
  std::mt19937_64 random(7);
  const auto uniform = [&] { return static_cast<float>(static_cast<int64_t>(random() >> 40) - (1 << 23)) * 0x1p-24f; };
  for (const bool same_amax : {true, false}) {
    TestWeight weight;
    weight.dtype = DType::kF32;
    weight.shape = {96, 1024};
    for (int64_t i = 0; i < 96 * 1024; ++i) {
      // Every block has the same largest magnitude, or blocks of some rows are far larger than the rest.
      const float value = same_amax ? (i % 16 == 3 ? 0.5f : uniform()) : std::ldexp(uniform(), static_cast<int>(i / 1024 % 7));
      weight.bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    BlockSample sample;
    float amax = 0;
    sample.Observe(TileOf(weight, 0, 96, 0, 1024), 0, 0, &amax);
    const double chosen = TotalAt(weight, sample.BestGlobalScale(Format(), amax));
    double least = INFINITY, most = 0;
    for (int i = 0; i < 16; ++i) {
      const double total = TotalAt(weight, scalar::CandidateGlobalScale(amax, i, 16));
      least = std::min(least, total);
      most = std::max(most, total);
    }
    EXPECT_LE(chosen, least * 1.01) << same_amax;
    if (same_amax) {
      EXPECT_GT(most, least * 1.2);
    }
  }
}

TEST(BlockSampleTest, BlocksOfZerosAreNotCounted) {
  TestWeight weight = RandomWeight(DType::kBF16, {2, 64}, 1);
  std::fill(weight.bytes.begin(), weight.bytes.end(), '\0');
  BlockSample sample;
  float amax = 0;
  sample.Observe(TileOf(weight, 0, 2, 0, 64), 0, 0, &amax);
  EXPECT_EQ(amax, 0);
  EXPECT_EQ(sample.BestGlobalScale(Format(), amax), 0);
}

TEST(BlockSampleTest, WeightsAreThePowerOfTheDifferencesFactor) {
  for (const float amax : {1.0f, 1.5f, 2.0f, 0x1p-20f, 0x1.8p90f, 0x1p-140f}) {
    const double factor = static_cast<double>(scalar::DifferenceFactor(amax));
    EXPECT_NEAR(scalar::BlockWeight(amax) * std::pow(factor, 2.4), 1, 1e-12) << amax;
  }
}

}  // namespace
}  // namespace quern::quant
