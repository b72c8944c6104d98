#include "daemon/queue/pending_tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace quern::daemon {
namespace {

bool Any(uint32_t) { return true; }

TEST(PendingTasks, GoesByNumberAcrossGroupsOfMemory) {
  PendingTasks tasks;
  for (uint32_t task : {5u, 1u, 3u}) tasks.Insert(task, 100);
  for (uint32_t task : {2u, 4u}) tasks.Insert(task, 200);
  std::vector<uint32_t> seen;
  EXPECT_EQ(tasks.First(200, 100, [&](uint32_t task) { return seen.push_back(task), false; }), std::nullopt);
  EXPECT_THAT(seen, testing::ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(tasks.First(200, 100, [](uint32_t task) { return task > 3; }), 4u);
}

TEST(PendingTasks, TasksThatNeedMoreAreLeftOut) {
  PendingTasks tasks;
  tasks.Insert(1, 200);
  tasks.Insert(2, 100);
  tasks.Insert(3, 300);
  EXPECT_EQ(tasks.First(199, 100, Any), 2u);
  EXPECT_EQ(tasks.First(99, 100, Any), std::nullopt);
  EXPECT_EQ(tasks.LeastAbove(100), 1u);
  EXPECT_EQ(tasks.LeastAbove(200), 3u);
  EXPECT_EQ(tasks.LeastAbove(300), std::nullopt);
}

TEST(PendingTasks, LooksAreBounded) {
  PendingTasks tasks;
  for (uint32_t task = 0; task < 10; ++task) tasks.Insert(task, 1);
  EXPECT_EQ(tasks.First(1, 3, [](uint32_t task) { return task == 3; }), std::nullopt);
  EXPECT_EQ(tasks.First(1, 4, [](uint32_t task) { return task == 3; }), 3u);
}

TEST(PendingTasks, CountsEachTaskOnce) {
  PendingTasks tasks;
  EXPECT_TRUE(tasks.empty());
  tasks.Insert(1, 1);
  tasks.Insert(1, 1);
  EXPECT_EQ(tasks.size(), 1);
  tasks.Erase(2, 1);
  tasks.Erase(1, 2);
  EXPECT_EQ(tasks.size(), 1);
  tasks.Erase(1, 1);
  EXPECT_TRUE(tasks.empty());
  EXPECT_EQ(tasks.First(1, 10, Any), std::nullopt);
}

}  // namespace
}  // namespace quern::daemon
