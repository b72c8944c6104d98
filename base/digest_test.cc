#include "base/digest.h"

#include <gtest/gtest.h>

namespace quern {
namespace {

TEST(DigestTest, Sha256OfKnownText) {
  EXPECT_EQ(HexDigest(Sha256Of("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(DigestTest, Sha256InPiecesEqualsWhole) {
  Sha256 sha;
  sha.Update("a");
  sha.Update("");
  sha.Update("bc");
  EXPECT_EQ(sha.Finish(), Sha256Of("abc"));
}

TEST(DigestTest, Xxh3OfEmptyIsTheSpecified) {
  EXPECT_EQ(Xxh3Of("", 0), 0x2D06800538D394C2u);
  EXPECT_EQ(HexDigest(Xxh3_128Of("")), "99aa06d3014798d86001c324468d497f");
}

}  // namespace
}  // namespace quern
