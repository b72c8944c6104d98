#include "base/worker_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"

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
      {std::string(kMaxWorkerName + 1, 'x'), "129 bytes"},
      {"a b", "at byte 1"},
      {"a/b", "at byte 1"},
      {"ab\n", "at byte 2"},
      {std::string("a\0b", 3), "at byte 1"},
      {"\x1b[31mred", "at byte 0"},
      {"a\x7f", "at byte 1"},
      {"a\xc2\x85", "at byte 1"},
      {"a\xff", "no UTF-8 at byte 1"},
      {"a\xc3", "no UTF-8 at byte 1"},
  };
  for (const auto& [name, message] : cases) {
    const absl::Status status = CheckWorkerName(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace quern
