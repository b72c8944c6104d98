// What every store must do. A store's test instantiates JobStoreConformance with its factory.
#ifndef QUERN_DAEMON_QUEUE_JOB_STORE_CONFORMANCE_H_
#define QUERN_DAEMON_QUEUE_JOB_STORE_CONFORMANCE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "daemon/queue/job_store.h"

namespace quern::daemon {

struct StoreFactory {
  std::string name;
  // Opens the store of a directory; the same directory again is the same store when it is durable.
  std::function<std::unique_ptr<JobStore>(const std::string& directory)> open;
  bool durable = false;
};

class JobStoreConformance : public testing::TestWithParam<StoreFactory> {
 protected:
  void SetUp() override {
    auto made = TempDir::Make("quern-store-test");
    ASSERT_THAT(made, IsOk());
    directory_ = std::make_unique<TempDir>(*std::move(made));
    Open();
  }

  void Open() {
    store_.reset();
    store_ = GetParam().open(directory_->path());
    ASSERT_NE(store_, nullptr);
  }

  static StoreWrite Put(std::string key, std::string value) { return {StoreWrite::Kind::kPut, std::move(key), std::move(value)}; }
  static StoreWrite Delete(std::string key) { return {StoreWrite::Kind::kDelete, std::move(key), ""}; }
  static StoreWrite DeletePrefix(std::string key) { return {StoreWrite::Kind::kDeletePrefix, std::move(key), ""}; }

  std::vector<std::pair<std::string, std::string>> ScanAll(const std::string& prefix) {
    std::vector<std::pair<std::string, std::string>> found;
    EXPECT_THAT(store_->Scan(prefix,
                             [&](absl::string_view key, absl::string_view value) {
                               found.emplace_back(std::string(key), std::string(value));
                               return absl::OkStatus();
                             }),
                IsOk());
    return found;
  }

  std::unique_ptr<TempDir> directory_;
  std::unique_ptr<JobStore> store_;
};

TEST_P(JobStoreConformance, MissingKeyIsNotFound) { EXPECT_THAT(store_->Get("zz"), StatusIs(absl::StatusCode::kNotFound)); }

TEST_P(JobStoreConformance, AcknowledgedWriteIsSeen) {
  QUERN_ASSERT_OK(store_->WriteSync({Put("k", std::string("a\0b", 3))}));
  EXPECT_THAT(store_->Get("k"), IsOkAndHolds(std::string("a\0b", 3)));
  QUERN_ASSERT_OK(store_->WriteSync({Put("k", "")}));
  EXPECT_THAT(store_->Get("k"), IsOkAndHolds(std::string()));
}

TEST_P(JobStoreConformance, WritesOfOneCallApplyInOrder) {
  QUERN_ASSERT_OK(store_->WriteSync({Put("k1", "1"), Delete("k1"), Put("k2", "1"), Put("k2", "2"), DeletePrefix("k3"), Put("k3", "3")}));
  EXPECT_THAT(store_->Get("k1"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(store_->Get("k2"), IsOkAndHolds(std::string("2")));
  EXPECT_THAT(store_->Get("k3"), IsOkAndHolds(std::string("3")));
}

TEST_P(JobStoreConformance, CallsApplyInOrder) {
  for (int i = 0; i < 100; ++i) store_->Write({Put("k", absl::StrCat(i))}, [](absl::Status) {});
  QUERN_ASSERT_OK(store_->WriteSync({}));
  EXPECT_THAT(store_->Get("k"), IsOkAndHolds(std::string("99")));
}

TEST_P(JobStoreConformance, DoneSeesItsOwnWrite) {
  std::atomic<int> seen{0};
  for (int i = 0; i < 50; ++i) {
    store_->Write({Put(absl::StrCat("k", i), "x")}, [&, i](absl::Status status) {
      if (status.ok() && store_->Get(absl::StrCat("k", i)).ok()) ++seen;
    });
  }
  QUERN_ASSERT_OK(store_->WriteSync({}));
  EXPECT_EQ(seen, 50);
}

TEST_P(JobStoreConformance, PrefixDeleteTakesExactlyThePrefix) {
  QUERN_ASSERT_OK(store_->WriteSync({Put(TaskKey('t', 1, 5), "a"), Put(TaskKey('t', 2, 0), "b"), Put(TaskKey('t', 2, 0xFFFFFFFF), "c"),
                                     Put(TaskKey('t', 3, 0), "d"), Put(JobKey('u', 2), "e"), Put(JobKey('w', ~uint64_t{0}), "f")}));
  QUERN_ASSERT_OK(store_->WriteSync({DeletePrefix(JobKey('t', 2)), DeletePrefix(JobKey('w', ~uint64_t{0}))}));
  EXPECT_THAT(ScanAll("t"), testing::ElementsAre(testing::Pair(TaskKey('t', 1, 5), "a"), testing::Pair(TaskKey('t', 3, 0), "d")));
  EXPECT_THAT(ScanAll("u"), testing::SizeIs(1));
  EXPECT_THAT(ScanAll("w"), testing::IsEmpty());
}

TEST_P(JobStoreConformance, ScanGoesInOrderOfKeys) {
  std::vector<StoreWrite> writes;
  for (uint32_t task : {300u, 2u, 70000u, 255u, 256u}) writes.push_back(Put(TaskKey('t', 7, task), absl::StrCat(task)));
  QUERN_ASSERT_OK(store_->WriteSync(std::move(writes)));
  std::vector<std::string> values;
  for (const auto& [key, value] : ScanAll(JobKey('t', 7))) values.push_back(value);
  EXPECT_THAT(values, testing::ElementsAre("2", "255", "256", "300", "70000"));
}

TEST_P(JobStoreConformance, ScanStopsAtAnError) {
  QUERN_ASSERT_OK(store_->WriteSync({Put("s1", ""), Put("s2", "")}));
  int visited = 0;
  EXPECT_THAT(store_->Scan("s",
                           [&](absl::string_view, absl::string_view) {
                             ++visited;
                             return absl::CancelledError("enough");
                           }),
              StatusIs(absl::StatusCode::kCancelled, "enough"));
  EXPECT_EQ(visited, 1);
}

TEST_P(JobStoreConformance, WritersOfManyThreadsAllArrive) {
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < 25; ++i) {
        if (!store_->WriteSync({Put(TaskKey('m', t, i), "x")}).ok()) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_THAT(ScanAll("m"), testing::SizeIs(100));
}

TEST_P(JobStoreConformance, ClosingFinishesWhatWasHandedOver) {
  std::atomic<int> done{0};
  for (int i = 0; i < 20; ++i) store_->Write({Put("k", "x")}, [&](absl::Status status) { done += status.ok(); });
  store_.reset();
  EXPECT_EQ(done, 20);
}

TEST_P(JobStoreConformance, DurableStoreKeepsRecordsOverReopening) {
  if (!GetParam().durable) GTEST_SKIP() << "this store keeps nothing";
  QUERN_ASSERT_OK(store_->WriteSync({Put("k", "kept"), Put("gone", "x")}));
  QUERN_ASSERT_OK(store_->WriteSync({Delete("gone")}));
  Open();
  EXPECT_THAT(store_->Get("k"), IsOkAndHolds(std::string("kept")));
  EXPECT_THAT(store_->Get("gone"), StatusIs(absl::StatusCode::kNotFound));
}

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_JOB_STORE_CONFORMANCE_H_
