#include "base/utf8.h"

#include <gtest/gtest.h>

namespace quern {
namespace {

TEST(Utf8, WellFormedTextIsValid) {
  for (const char* text : {"", "plain", "\x7f", "\xC2\x80", "gr\xC3\xBC\xC3\x9F", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
                           "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(IsValidUtf8(text)) << text;
  }
  EXPECT_TRUE(IsValidUtf8(absl::string_view("a\0b", 3)));
}

TEST(Utf8, EverythingElseIsNot) {
  for (const char* text : {"\xFF", "a\x80", "\xC3", "\xC3(", "\xC0\xAF", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xE2\x82",
                           "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xF0\x9F\x98"}) {
    EXPECT_FALSE(IsValidUtf8(text)) << text;
  }
}

TEST(Utf8, OnlyBrokenTextIsEscaped) {
  EXPECT_EQ(EscapeUnlessUtf8("gr\xC3\xBC\xC3\x9F"), "gr\xC3\xBC\xC3\x9F");
  EXPECT_EQ(EscapeUnlessUtf8("LICENSE-\xFF"), "LICENSE-\\xff");
}

}  // namespace
}  // namespace quern
