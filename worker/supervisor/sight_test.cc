#include "worker/supervisor/sight.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;

class SightTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 10'000; ++i) content_.push_back(static_cast<char>(i * 7));
    QUERN_ASSERT_OK(WriteFileDurably(path(), content_));
    challenge_.set_job("jobs/1");
    challenge_.set_what(quern::v1::SightChallenge::SOURCE);
    challenge_.set_path(path());
    challenge_.set_size(content_.size());
    challenge_.set_nonce("nonce");
  }
  std::string path() const { return JoinPath(dir_->path(), "shard"); }

  absl::StatusOr<TempDir> dir_ = TempDir::Make("sight_test");
  std::string content_;
  quern::v1::SightChallenge challenge_;
  PathMap paths_;
};

TEST_F(SightTest, DigestsNonceAndSamplesInOrder) {
  challenge_.add_offsets(4096);
  challenge_.add_offsets(0);
  const quern::v1::SightAnswer answer = AnswerSight(challenge_, paths_);
  EXPECT_TRUE(answer.seen());
  EXPECT_EQ(answer.job(), "jobs/1");
  EXPECT_EQ(answer.what(), quern::v1::SightChallenge::SOURCE);
  EXPECT_EQ(answer.nonce(), "nonce");
  EXPECT_EQ(answer.digest(), Sha256Of("nonce" + content_.substr(4096, 4096) + content_.substr(0, 4096)));
}

TEST_F(SightTest, SamplesAreClippedAtTheEnd) {
  challenge_.add_offsets(9'000);
  challenge_.add_offsets(10'000);
  challenge_.add_offsets(1'000'000);
  EXPECT_EQ(AnswerSight(challenge_, paths_).digest(), Sha256Of("nonce" + content_.substr(9'000)));
}

TEST_F(SightTest, AnotherSizeIsNotSeen) {
  challenge_.set_size(10'001);
  const quern::v1::SightAnswer answer = AnswerSight(challenge_, paths_);
  EXPECT_FALSE(answer.seen());
  EXPECT_THAT(answer.detail(), HasSubstr("has 10000 bytes here, the coordinator sees 10001"));
}

TEST_F(SightTest, MissingFileIsNotSeen) {
  challenge_.set_path(path() + ".gone");
  const quern::v1::SightAnswer answer = AnswerSight(challenge_, paths_);
  EXPECT_FALSE(answer.seen());
  EXPECT_THAT(answer.detail(), HasSubstr("shard.gone"));
}

TEST_F(SightTest, FifoIsNotSeenAndDoesNotBlock) {
  challenge_.set_path(path() + ".fifo");
  ASSERT_EQ(mkfifo(challenge_.path().c_str(), 0600), 0);
  EXPECT_THAT(AnswerSight(challenge_, paths_).detail(), HasSubstr("no regular file"));
}

TEST_F(SightTest, CoordinatorsPathIsMapped) {
  QUERN_ASSERT_OK(paths_.Add("/elsewhere=" + dir_->path()));
  challenge_.set_path("/elsewhere/shard");
  challenge_.set_create_in("/elsewhere");
  challenge_.add_offsets(0);
  EXPECT_EQ(AnswerSight(challenge_, paths_).digest(), Sha256Of("nonce" + content_.substr(0, 4096)));
}

TEST_F(SightTest, DirectoryThatTakesAFileIsSeenAndLeftAsItWas) {
  challenge_.set_create_in(dir_->path());
  EXPECT_TRUE(AnswerSight(challenge_, paths_).seen());
  EXPECT_THAT(ListDirectory(dir_->path()), IsOkAndHolds(::testing::ElementsAre("shard")));
}

TEST_F(SightTest, DirectoryThatTakesNoFileIsNotSeen) {
  challenge_.set_create_in(JoinPath(dir_->path(), "gone"));
  const quern::v1::SightAnswer answer = AnswerSight(challenge_, paths_);
  EXPECT_FALSE(answer.seen());
  EXPECT_THAT(answer.detail(), HasSubstr("gone/sight-"));
}

TEST_F(SightTest, OutputBehindALinkIsNotSeenUnlessItIsMapped) {
  const std::string link = dir_->path() + ".link";
  ASSERT_EQ(symlink(dir_->path().c_str(), link.c_str()), 0);
  challenge_.set_create_in(link);
  EXPECT_THAT(AnswerSight(challenge_, paths_).detail(), HasSubstr("symbolic link"));
  QUERN_ASSERT_OK(paths_.Add("/theirs=" + link));
  challenge_.set_create_in("/theirs");
  EXPECT_TRUE(AnswerSight(challenge_, paths_).seen());
  ASSERT_EQ(unlink(link.c_str()), 0);
}

TEST_F(SightTest, TooManySamplesAreNotRead) {
  for (int i = 0; i <= kMaxSightSamples; ++i) challenge_.add_offsets(0);
  EXPECT_THAT(AnswerSight(challenge_, paths_).detail(), HasSubstr("4097 samples"));
}

}  // namespace
}  // namespace quern::worker
