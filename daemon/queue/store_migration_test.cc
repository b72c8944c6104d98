#include "daemon/queue/store_migration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status_matchers.h"
#include "daemon/queue/crash_store.h"
#include "daemon/queue/job_queue.h"
#include "quern/store/store.pb.h"

namespace quern::daemon {
namespace {

using testing::HasSubstr;

StoreWrite Put(std::string key, std::string value) { return {StoreWrite::Kind::kPut, std::move(key), std::move(value)}; }

uint32_t VersionOf(JobStore* store) {
  quern::store::StoreVersion version;
  const absl::StatusOr<std::string> text = store->Get("v");
  EXPECT_THAT(text, IsOk());
  EXPECT_TRUE(version.ParseFromString(text.value_or("")));
  return version.version();
}

// What version 1 wrote of an unfinished job.
std::vector<StoreWrite> RecordsOfVersion1() {
  quern::store::StoreVersion version;
  version.set_version(1);
  quern::store::JobRecord job;
  job.set_id(7);
  job.mutable_spec()->set_output("/out");
  job.set_state(quern::v1::Job::RUNNING);
  job.set_tasks(1);
  job.set_max_failures(3);
  quern::v1::PlanSummary plan;
  plan.set_numerics_version(5);
  quern::store::TaskRecord task;
  task.set_state(quern::v1::Task::COMMITTED);
  task.set_next_attempt(2);
  task.set_committed_attempt(1);
  task.set_has_output(true);
  return {Put("v", version.SerializeAsString()), Put(JobKey('j', 7), job.SerializeAsString()),
          Put(JobKey('p', 7), plan.SerializeAsString()), Put(TaskKey('t', 7, 0), task.SerializeAsString()),
          Put("n", JobKey('n', 8).substr(1))};
}

TEST(StoreMigration, EmptyStoreIsMarked) {
  auto store = NewMemoryJobStore();
  QUERN_ASSERT_OK(PrepareStore(store.get(), "s"));
  EXPECT_EQ(VersionOf(store.get()), kStoreVersion);
  QUERN_EXPECT_OK(PrepareStore(store.get(), "s"));
}

TEST(StoreMigration, Version1GetsTheNumericsOfItsPlansAndGoesOn) {
  auto store = NewMemoryJobStore();
  QUERN_ASSERT_OK(store->WriteSync(RecordsOfVersion1()));
  QUERN_ASSERT_OK(PrepareStore(store.get(), "s"));
  EXPECT_EQ(VersionOf(store.get()), kStoreVersion);
  ManualClock clock;
  JobQueueOptions options;
  options.store = store.get();
  options.clock = &clock;
  options.numerics_version = 6;
  options.run = [](std::function<void()> work) { work(); };
  QUERN_ASSERT_OK_AND_ASSIGN(auto queue, JobQueue::Open(std::move(options)));
  const auto record = queue->Record(7);
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->numerics_version(), 5);
  EXPECT_EQ(record->spec().output(), "/out");
  EXPECT_EQ(queue->CommittedAttempts(7).size(), 1);
}

TEST(StoreMigration, Version2GetsWhoAuditedAndWhoDisagreed) {
  auto store = NewMemoryJobStore();
  std::vector<StoreWrite> records;
  quern::store::StoreVersion version;
  version.set_version(2);
  records.push_back(Put("v", version.SerializeAsString()));
  quern::store::JobRecord job;
  job.set_id(7);
  job.set_state(quern::v1::Job::FAILED);
  job.set_tasks(3);
  job.set_numerics_version(5);
  job.mutable_error()->set_reason("DATA_LOSS");
  job.mutable_error()->set_task("jobs/7/tasks/2");
  records.push_back(Put(JobKey('j', 7), job.SerializeAsString()));
  // Task 0 was audited by b, task 1 by a itself, and in task 2 they disagreed.
  for (uint32_t i = 0; i < 3; ++i) {
    quern::store::TaskRecord task;
    task.set_state(i < 2 ? quern::v1::Task::COMMITTED : quern::v1::Task::FAILED);
    task.set_next_attempt(3);
    task.set_has_output(true);
    task.set_audit(i < 2 ? quern::store::TaskRecord::PASSED : quern::store::TaskRecord::DUE);
    if (i < 2) task.set_committed_by("a");
    if (i < 2) task.set_committed_attempt(1);
    records.push_back(Put(TaskKey('t', 7, i), task.SerializeAsString()));
    quern::store::AttemptRecord attempt;
    attempt.set_worker("a");
    attempt.set_state(quern::v1::Attempt::COMMITTED);
    attempt.set_commit_sequence(i + 1);
    records.push_back(Put(AttemptKey(7, i, 1), attempt.SerializeAsString()));
    attempt.set_worker(i == 1 ? "a" : "b");
    attempt.set_purpose(quern::v1::AUDIT);
    attempt.clear_commit_sequence();
    if (i == 2) attempt.set_state(quern::v1::Attempt::FAILED);
    records.push_back(Put(AttemptKey(7, i, 2), attempt.SerializeAsString()));
  }
  QUERN_ASSERT_OK(store->WriteSync(std::move(records)));
  QUERN_ASSERT_OK(PrepareStore(store.get(), "s"));
  EXPECT_EQ(VersionOf(store.get()), kStoreVersion);
  std::vector<std::string> audited_by;
  QUERN_ASSERT_OK(store->Scan(JobKey('t', 7), [&](absl::string_view, absl::string_view value) {
    quern::store::TaskRecord task;
    EXPECT_TRUE(task.ParseFromArray(value.data(), static_cast<int>(value.size())));
    audited_by.push_back(task.audited_by());
    return absl::OkStatus();
  }));
  EXPECT_THAT(audited_by, testing::ElementsAre("b", "a", ""));
  ManualClock clock;
  JobQueueOptions options;
  options.store = store.get();
  options.clock = &clock;
  options.numerics_version = 5;
  options.run = [](std::function<void()> work) { work(); };
  QUERN_ASSERT_OK_AND_ASSIGN(auto queue, JobQueue::Open(std::move(options)));
  queue->ResumeJob(7, {}, nullptr);
  const auto record = queue->Record(7);
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->numerics_version(), 5);
  ASSERT_EQ(record->disputes_size(), 1);
  EXPECT_EQ(record->disputes(0).worker(), "b");
  EXPECT_EQ(record->disputes(0).other(), "a");
  // What it audited itself is audited again.
  std::promise<quern::v1::Progress> progress;
  queue->GetJob(7, [&](absl::StatusOr<quern::v1::Job> now) { progress.set_value(now->progress()); });
  EXPECT_EQ(progress.get_future().get().tasks_audited(), 1);
}

TEST(StoreMigration, CrashLeavesTheOldVersionWhole) {
  CrashStore store;
  std::vector<StoreWrite> old = RecordsOfVersion1();
  store.Write(old, [](absl::Status) {});
  store.Sync();
  store.FailWith(absl::UnavailableError("crashed"));
  std::thread migration([&] { EXPECT_THAT(PrepareStore(&store, "s"), StatusIs(absl::StatusCode::kUnavailable)); });
  while (!store.SyncOne()) std::this_thread::yield();
  migration.join();
  EXPECT_EQ(VersionOf(&store), 1);
  for (const StoreWrite& write : old) EXPECT_THAT(store.Get(write.key), IsOkAndHolds(write.value));
}

TEST(StoreMigration, NewerVersionIsRefusedUnchanged) {
  auto store = NewMemoryJobStore();
  quern::store::StoreVersion version;
  version.set_version(kStoreVersion + 1);
  QUERN_ASSERT_OK(store->WriteSync({Put("v", version.SerializeAsString())}));
  EXPECT_THAT(PrepareStore(store.get(), "s"), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("use the newer program")));
  EXPECT_EQ(VersionOf(store.get()), kStoreVersion + 1);
}

TEST(StoreMigration, RecordsWithoutAVersionAreRefused) {
  auto store = NewMemoryJobStore();
  QUERN_ASSERT_OK(store->WriteSync({Put("x", "")}));
  EXPECT_THAT(PrepareStore(store.get(), "s"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("no version")));
}

TEST(StoreMigration, UnreadableRecordsStopIt) {
  auto store = NewMemoryJobStore();
  std::vector<StoreWrite> records = RecordsOfVersion1();
  records.push_back(Put(JobKey('p', 7), "\xFF\xFF"));
  QUERN_ASSERT_OK(store->WriteSync(std::move(records)));
  EXPECT_THAT(PrepareStore(store.get(), "s"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("jobs/7")));
  EXPECT_EQ(VersionOf(store.get()), 1);
}

}  // namespace
}  // namespace quern::daemon
