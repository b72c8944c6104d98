#include "quant/scalar/pack_bits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace quern::quant::scalar {
namespace {

using ::testing::ElementsAre;

std::vector<uint32_t> Pack(const std::vector<uint32_t>& codes, int bits) {
  std::vector<uint32_t> words(PackedBytes(static_cast<int64_t>(codes.size()), bits) / 4, 0xDEADBEEF);
  BitWriter writer(reinterpret_cast<unsigned char*>(words.data()), bits);
  for (const uint32_t code : codes) writer.Put(code);
  writer.Finish();
  return words;
}

TEST(PackBitsTest, ExampleOfTheHeader) { EXPECT_THAT(Pack({1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 7}, 3), ElementsAre(0xD11F58D1, 0x1)); }

TEST(PackBitsTest, LowestCodeIsInTheLowBits) {
  EXPECT_THAT(Pack({0xF, 0x5, 0x9, 0x1, 0xD, 0x8, 0x6, 0xC}, 4), ElementsAre(0xC68D195F));
  EXPECT_THAT(Pack({0x12, 0x34, 0x56, 0x78, 0x9A}, 8), ElementsAre(0x78563412, 0x9A));
}

TEST(PackBitsTest, EveryCodeComesBackAndTheRestIsZero) {
  for (int bits = 2; bits <= 8; ++bits) {
    for (int count = 1; count <= 70; ++count) {
      std::vector<uint32_t> codes;
      for (int i = 0; i < count; ++i) codes.push_back(static_cast<uint32_t>(i * 37 + 11) & ((1u << bits) - 1));
      const std::vector<uint32_t> words = Pack(codes, bits);
      ASSERT_EQ(words.size(), static_cast<size_t>((count * bits + 31) / 32));
      for (int i = 0; i < count; ++i) {
        ASSERT_EQ(UnpackCode(reinterpret_cast<const unsigned char*>(words.data()), i, bits), codes[i]) << bits << " bits, code " << i;
      }
      EXPECT_EQ(uint64_t{words.back()} >> ((count * bits - 1) % 32 + 1), 0u);
    }
  }
}

TEST(PackBitsTest, PositionsInAColumnFollowTheSameStream) {
  const ColumnPosition position = PositionInColumn(10, 3);
  EXPECT_EQ(position.word, 0);
  EXPECT_EQ(position.shift, 30);
  EXPECT_TRUE(position.straddles);
  EXPECT_EQ(PositionInColumn(32, 3).word, 3);
  EXPECT_EQ(PositionInColumn(32, 3).shift, 0);
  EXPECT_FALSE(PositionInColumn(7, 4).straddles);
}

}  // namespace
}  // namespace quern::quant::scalar
