#include "base/time_option.h"

#include "base/status_matchers.h"

namespace quern {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(TimeOptionTest, TimesAsPeopleWriteThem) {
  const auto parse = [](absl::string_view text) { return ParseTimeOption(text, absl::ZeroDuration(), absl::Hours(1000)).value(); };
  EXPECT_EQ(parse("30s"), absl::Seconds(30));
  EXPECT_EQ(parse("11h30m"), absl::Minutes(690));
  EXPECT_EQ(parse("1h2m3s4ms"), absl::Hours(1) + absl::Minutes(2) + absl::Seconds(3) + absl::Milliseconds(4));
  EXPECT_EQ(parse("1.5h"), absl::Minutes(90));
  EXPECT_EQ(parse("720h"), absl::Hours(720));
  EXPECT_EQ(parse("250ms"), absl::Milliseconds(250));
  EXPECT_EQ(parse("0s"), absl::ZeroDuration());
}

TEST(TimeOptionTest, WhatIsNoTimeOrOutOfRangeSaysWhatMayBeGiven) {
  for (const char* text : {"",    " ",     "30",     "s",    "h30m", "-1s",   "+1s",          "1s ",
                           "1 s", "inf",   "nan",    "infh", "1h1h", "1s1m",  "1m1m1s",       "1d",
                           "1H",  "1us",   "1.2.3s", ".s",   "1e3s", "0x10s", "99999999999h", "1000000000000000000000000000000h",
                           "0s",  "999ms", "24h1ms"}) {
    EXPECT_THAT(ParseTimeOption(text, absl::Seconds(1), absl::Hours(24)),
                StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr(text), HasSubstr("from 1s to 24h"))))
        << text;
  }
  QUERN_EXPECT_OK(ParseTimeOption("1s", absl::Seconds(1), absl::Hours(24)));
  QUERN_EXPECT_OK(ParseTimeOption("24h", absl::Seconds(1), absl::Hours(24)));
}

}  // namespace
}  // namespace quern
