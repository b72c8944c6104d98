#include "daemon/rpc/shard_uploads.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

class ShardUploadsTest : public testing::Test {
 protected:
  static constexpr UploadKey kKey{1, 2, 3};
  const TempDir dir_ = TempDir::Make("uploads").value();
  const std::string path_ = JoinPath(dir_.path(), "2.3");
  ShardUploads uploads_;
  uint64_t have_ = 0;
};

TEST_F(ShardUploadsTest, UnfinishedFilesOfAttemptsThatAreOverAreRemoved) {
  const auto upload = uploads_.Find(kKey, path_);
  QUERN_ASSERT_OK_AND_ASSIGN(const uint64_t turn, upload->Open(10, 0, &have_));
  QUERN_ASSERT_OK(upload->Write(turn, 0, "abc"));
  uploads_.Sweep([](const UploadKey&) { return true; });
  EXPECT_TRUE(FileExists(path_));
  uploads_.Sweep([](const UploadKey&) { return false; });
  EXPECT_FALSE(FileExists(path_));
  EXPECT_THAT(upload->Write(turn, 3, "d"), StatusIs(absl::StatusCode::kAborted));
}

TEST_F(ShardUploadsTest, FinishedFilesStay) {
  const auto upload = uploads_.Find(kKey, path_);
  QUERN_ASSERT_OK_AND_ASSIGN(const uint64_t turn, upload->Open(3, 0, &have_));
  QUERN_ASSERT_OK(upload->Write(turn, 0, "abc"));
  QUERN_ASSERT_OK(upload->Finish(turn));
  // Also when the end comes between the finish and its being forgotten.
  uploads_.Sweep([](const UploadKey&) { return false; });
  EXPECT_THAT(ReadFileToString(path_), IsOkAndHolds(std::string("abc")));
}

TEST_F(ShardUploadsTest, AfterAnErrorOnlyDurableBytesCount) {
  const auto upload = uploads_.Find(kKey, path_);
  QUERN_ASSERT_OK_AND_ASSIGN(const uint64_t turn, upload->Open(10, 0, &have_));
  QUERN_ASSERT_OK(upload->Write(turn, 0, "abcd"));
  EXPECT_THAT(upload->Sync(turn), IsOkAndHolds(4));
  // Files may have 6 bytes for a moment.
  ASSERT_NE(signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {6, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status failed = upload->Write(turn, 4, "efgh");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(failed, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(upload->Write(turn, 4, "efgh"), StatusIs(absl::StatusCode::kAborted));
  QUERN_ASSERT_OK_AND_ASSIGN(const uint64_t next, upload->Open(10, 4, &have_));
  EXPECT_EQ(have_, 4);
  QUERN_ASSERT_OK(upload->Write(next, 4, "efghij"));
  QUERN_ASSERT_OK(upload->Finish(next));
  EXPECT_THAT(ReadFileToString(path_), IsOkAndHolds(std::string("abcdefghij")));
}

TEST_F(ShardUploadsTest, FileThatFailedIsRemovedToo) {
  const auto upload = uploads_.Find(kKey, path_);
  QUERN_ASSERT_OK_AND_ASSIGN(const uint64_t turn, upload->Open(10, 0, &have_));
  ASSERT_NE(signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {2, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status failed = upload->Write(turn, 0, "abcd");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_FALSE(failed.ok());
  uploads_.Sweep([](const UploadKey&) { return false; });
  EXPECT_FALSE(FileExists(path_));
}

TEST_F(ShardUploadsTest, FileOfAnotherIsNotFollowed) {
  const std::string other = JoinPath(dir_.path(), "other");
  QUERN_ASSERT_OK(WriteFileDurably(other, "mine"));
  ASSERT_EQ(symlink(other.c_str(), path_.c_str()), 0);
  EXPECT_FALSE(uploads_.Find(kKey, path_)->Open(3, 0, &have_).ok());
  EXPECT_THAT(ReadFileToString(other), IsOkAndHolds(std::string("mine")));
}

TEST_F(ShardUploadsTest, ShardThatDoesNotFitIsRefusedAtOnce) {
  const absl::Status status = uploads_.Find(kKey, path_)->Open(uint64_t{1} << 62, 0, &have_).status();
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(FileExists(path_));
}

}  // namespace
}  // namespace quern::daemon
