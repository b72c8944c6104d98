#include "base/worker_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "base/text_check.h"

namespace quern {
namespace {

using testing::HasSubstr;

TEST(WorkerName, AcceptsWhatPeopleCallTheirMachines) {
  for (const std::string& name :
       std::vector<std::string>{"w", "node7", "gpu-3.example.org-12345", "a_b:c@d+e", "m\xc3\xbchle", std::string(kMaxWorkerName, 'x')}) {
    EXPECT_THAT(CheckWorkerName(name), IsOk()) << name;
  }
}

TEST(WorkerName, RefusesWhatCannotBeShownOrLookedUp) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "empty"},
      {".", "the name ."},
      {"..", "the name .."},
      {std::string(kMaxWorkerName + 1, 'x'), "129 bytes"},
      {"a b", "at byte 1"},
      {"a/b", "at byte 1"},
      {"ab\n", "at byte 2"},
      {std::string("a\0b", 3), "at byte 1"},
      {"\x1b[31mred", "at byte 0"},
      {"a\x7f", "at byte 1"},
      {"a\xc2\x85", "at byte 1"},
      {"a\u202egpj", "at byte 1"},  // shows as a, then jpg
      {"a\u2066", "at byte 1"},
      {"ab\u200f", "at byte 2"},
      {"a\u200b", "at byte 1"},  // shows as a
      {"a\u00ad", "at byte 1"},
      {"a\u2028", "at byte 1"},
      {"a\u00a0b", "at byte 1"},
      {"a\U000e0041", "at byte 1"},
      {"a\xff", "no UTF-8 at byte 1"},
      {"a\xc3", "no UTF-8 at byte 1"},
  };
  for (const auto& [name, message] : cases) {
    const absl::Status status = CheckWorkerName(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST(CordonReason, IsOneLineOfText) {
  for (const std::string& reason :
       std::vector<std::string>{"", "fan 2 is loud, see #31", "L\u00fcfter \u2013 \u4e2d\u6587", std::string(kMaxCordonReason, 'x')}) {
    EXPECT_THAT(CheckCordonReason(reason), IsOk()) << reason;
  }
  for (const std::string& reason : std::vector<std::string>{"a\nb", "\x1b[2J", "a\tb", std::string("a\0b", 3), "a\u0085", "a\u202eb",
                                                            "a\u2067b", "a\xff", std::string(kMaxCordonReason + 1, 'x')}) {
    EXPECT_THAT(CheckCordonReason(reason), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the reason has"))) << reason;
  }
}

TEST(TextCheck, OneLineHasNoControlsAndIsCutBetweenCharacters) {
  EXPECT_EQ(OneLine("plain \xc3\xa9"), "plain \xc3\xa9");
  EXPECT_EQ(OneLine("a\nb\x1b[31m\rc\u202ed\xff"), "a b [31m c d ");
  EXPECT_EQ(OneLine("12345", 5), "12345");
  EXPECT_EQ(OneLine("1234\xc3\xa9", 5), "1234... (cut here: it has 6 bytes)");
  EXPECT_EQ(OneLine("1234\xe2\x82\xac", 6), "1234... (cut here: it has 7 bytes)");
}

TEST(TextCheck, PlainLinesKeepsLinesAndTabs) { EXPECT_EQ(PlainLines("a\n\tb\x1b[2J\r\u2028c"), "a\n\tb [2J  c"); }

}  // namespace
}  // namespace quern
