#include "base/log_fields.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(LogFields, ValuesCannotPretendToBeMore) {
  EXPECT_EQ(LogValue("jobs/7"), "jobs/7");
  EXPECT_EQ(LogValue("ipv6:[::1]:7450"), "ipv6:[::1]:7450");
  EXPECT_EQ(LogValue(""), "\"\"");
  EXPECT_EQ(LogValue("a b"), "\"a b\"");
  EXPECT_EQ(LogValue("x\" who=admin\n"), "\"x\\\" who=admin\\n\"");
  EXPECT_EQ(LogValue("a=b"), "\"a=b\"");
  EXPECT_EQ(LogValue(std::string(5000, 'x')).size(), 203u);
}

TEST(LogFields, AttemptsAreNamedInOneWay) {
  EXPECT_EQ(AttemptFields("jobs/1", 24, 2), "job=jobs/1 task=24 attempt=2");
  EXPECT_EQ(TaskFields("jobs/1", 24), "job=jobs/1 task=24");
  // A name that a peer made up.
  EXPECT_EQ(AttemptFields("x attempt=9", 1, 1), "job=\"x attempt=9\" task=1 attempt=1");
}

TEST(LogFields, LinesAreReadBack) {
  const std::string message = "cannot read \"/a b\": é\n attempt=9";
  const std::string line = absl::StrCat("attempt event=ended ", AttemptFields("jobs/1", 24, 2), MessageField(message), " left=3");
  EXPECT_THAT(ParseLogFields(line), ElementsAre(Pair("event", "ended"), Pair("job", "jobs/1"), Pair("task", "24"), Pair("attempt", "2"),
                                                Pair("message", message), Pair("left", "3")));
}

TEST(LogFields, SentencesHaveNoFields) {
  EXPECT_THAT(ParseLogFields("listening on unix:/run/x=y.sock"), IsEmpty());
  EXPECT_THAT(ParseLogFields("an open=\"quote that does not end"), IsEmpty());
  EXPECT_THAT(ParseLogFields(""), IsEmpty());
  EXPECT_THAT(ParseLogFields("a= b"), ElementsAre(Pair("a", "")));
}

}  // namespace
}  // namespace quern
