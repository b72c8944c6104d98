#include <memory>
#include <string>

#include "base/file.h"
#include "base/status_matchers.h"
#include "daemon/queue/job_store.h"
#include "daemon/queue/job_store_conformance.h"
#include "daemon/queue/store_migration.h"
#include "quern/store/store.pb.h"

namespace quern::daemon {
namespace {

using testing::HasSubstr;

std::unique_ptr<JobStore> Open(const std::string& directory) {
  auto store = OpenRocksDbJobStore(JoinPath(directory, "state"));
  EXPECT_THAT(store, IsOk());
  return store.ok() ? *std::move(store) : nullptr;
}

INSTANTIATE_TEST_SUITE_P(RocksDb, JobStoreConformance, testing::Values(StoreFactory{"rocksdb", Open, true}),
                         [](const auto& info) { return info.param.name; });

class RocksDbJobStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    auto made = TempDir::Make("quern-store-test");
    ASSERT_THAT(made, IsOk());
    directory_ = std::make_unique<TempDir>(*std::move(made));
    path_ = JoinPath(directory_->path(), "deep/state");
  }
  std::unique_ptr<TempDir> directory_;
  std::string path_;
};

TEST_F(RocksDbJobStoreTest, FirstRecordIsTheVersion) {
  QUERN_ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbJobStore(path_));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, store->Get("v"));
  quern::store::StoreVersion version;
  ASSERT_TRUE(version.ParseFromString(text));
  EXPECT_EQ(version.version(), kStoreVersion);
}

TEST_F(RocksDbJobStoreTest, NewerVersionIsRefused) {
  {
    QUERN_ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbJobStore(path_));
    quern::store::StoreVersion version;
    version.set_version(kStoreVersion + 1);
    QUERN_ASSERT_OK(store->WriteSync({{StoreWrite::Kind::kPut, "v", version.SerializeAsString()}}));
  }
  EXPECT_THAT(OpenRocksDbJobStore(path_), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("has version 4")));
}

TEST_F(RocksDbJobStoreTest, OlderVersionIsMigratedAndThenRefusedByTheOlderProgram) {
  {
    QUERN_ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbJobStore(path_));
    quern::store::StoreVersion version;
    version.set_version(1);
    quern::store::JobRecord job;
    job.set_id(3);
    quern::v1::PlanSummary plan;
    plan.set_numerics_version(4);
    QUERN_ASSERT_OK(store->WriteSync({{StoreWrite::Kind::kPut, "v", version.SerializeAsString()},
                                      {StoreWrite::Kind::kPut, JobKey('j', 3), job.SerializeAsString()},
                                      {StoreWrite::Kind::kPut, JobKey('p', 3), plan.SerializeAsString()}}));
  }
  QUERN_ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbJobStore(path_));
  quern::store::StoreVersion version;
  ASSERT_TRUE(version.ParseFromString(store->Get("v").value()));
  EXPECT_EQ(version.version(), kStoreVersion);
  quern::store::JobRecord job;
  ASSERT_TRUE(job.ParseFromString(store->Get(JobKey('j', 3)).value()));
  EXPECT_EQ(job.numerics_version(), 4);
}

TEST_F(RocksDbJobStoreTest, RecordsWithoutAVersionAreRefused) {
  {
    QUERN_ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbJobStore(path_));
    QUERN_ASSERT_OK(store->WriteSync({{StoreWrite::Kind::kDelete, "v", ""}, {StoreWrite::Kind::kPut, "x", ""}}));
  }
  EXPECT_THAT(OpenRocksDbJobStore(path_), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("no version")));
}

TEST_F(RocksDbJobStoreTest, StoreOpenElsewhereIsUnavailable) {
  QUERN_ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbJobStore(path_));
  EXPECT_THAT(OpenRocksDbJobStore(path_), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("in use by another coordinator")));
}

}  // namespace
}  // namespace quern::daemon
