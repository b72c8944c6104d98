#include "client/output_state.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::client {
namespace {

using ::testing::HasSubstr;

class OutputStateTest : public testing::Test {
 protected:
  void SetUp() override {
    QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("state"));
    directory_.emplace(std::move(directory));
    output_ = directory_->path() + "/parent/out";
  }
  std::optional<TempDir> directory_;
  std::string output_;
};

TEST_F(OutputStateTest, UndoLeavesNothingOfAnOutputThatWasNotThere) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  EXPECT_FALSE(state.existed());
  EXPECT_EQ(state.directory(), output_ + "/.quern/state");
  QUERN_ASSERT_OK(WriteFileDurably(state.directory() + "/CURRENT", "x"));
  QUERN_ASSERT_OK(state.Undo());
  EXPECT_FALSE(FileExists(directory_->path() + "/parent"));
}

TEST_F(OutputStateTest, UndoKeepsWhatWasThereBefore) {
  QUERN_ASSERT_OK(MakeDirectories(output_));
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  QUERN_ASSERT_OK(state.Undo());
  EXPECT_TRUE(FileExists(output_));
  EXPECT_FALSE(FileExists(output_ + "/.quern"));
}

TEST_F(OutputStateTest, UndoKeepsFilesThatSomebodyElsePutThere) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  QUERN_ASSERT_OK(WriteFileDurably(output_ + "/note.txt", "x"));
  QUERN_ASSERT_OK(state.Undo());
  EXPECT_TRUE(FileExists(output_ + "/note.txt"));
  EXPECT_FALSE(FileExists(output_ + "/.quern"));
}

TEST_F(OutputStateTest, UndoKeepsTheStateOfAnEarlierRun) {
  QUERN_ASSERT_OK(MakeDirectories(output_ + "/.quern/state"));
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  EXPECT_TRUE(state.existed());
  QUERN_ASSERT_OK(state.Undo());
  EXPECT_TRUE(FileExists(output_ + "/.quern/state"));
}

TEST_F(OutputStateTest, RemovedStateLeavesTheRecordOfTheRun) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  QUERN_ASSERT_OK(WriteFileDurably(output_ + "/.quern/run.json", "{}"));
  QUERN_ASSERT_OK(state.RemoveState());
  EXPECT_FALSE(FileExists(output_ + "/.quern/state"));
  EXPECT_TRUE(FileExists(output_ + "/.quern/run.json"));
}

TEST_F(OutputStateTest, RemovedStateLeavesNoEmptyDirectory) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  QUERN_ASSERT_OK(state.RemoveState());
  EXPECT_FALSE(FileExists(output_ + "/.quern"));
  EXPECT_TRUE(FileExists(output_));
}

TEST_F(OutputStateTest, RemovalThatWasCutShortIsFinishedByTheNextCommand) {
  const std::string gone = output_ + "/.quern/state.gone";
  QUERN_ASSERT_OK(MakeDirectories(gone));
  QUERN_ASSERT_OK(WriteFileDurably(gone + "/000009.log", "x"));
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  EXPECT_FALSE(state.existed());
  EXPECT_FALSE(FileExists(gone));
  EXPECT_TRUE(FileExists(state.directory()));
  // Nor is one in the way that came in between.
  QUERN_ASSERT_OK(MakeDirectories(gone));
  QUERN_ASSERT_OK(state.RemoveState());
  EXPECT_FALSE(FileExists(output_ + "/.quern"));
}

TEST_F(OutputStateTest, SecondCommandIsRefusedWhileTheFirstLives) {
  {
    QUERN_ASSERT_OK_AND_ASSIGN(OutputState first, OutputState::Prepare(output_));
    EXPECT_THAT(OutputState::Prepare(output_), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(output_)));
    EXPECT_TRUE(FileExists(first.directory()));
  }
  QUERN_EXPECT_OK(OutputState::Prepare(output_));
}

TEST_F(OutputStateTest, StoreThatAnotherProcessHasOpenIsNoticed) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputState state, OutputState::Prepare(output_));
  EXPECT_FALSE(state.HeldByOldCoordinator());
  const std::string path = state.directory() + "/LOCK";
  QUERN_ASSERT_OK(WriteFileDurably(path, ""));
  EXPECT_FALSE(state.HeldByOldCoordinator());
  int ready[2], done[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  if (child == 0) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    const int fd = open(path.c_str(), O_RDWR);
    char byte = fcntl(fd, F_SETLK, &lock) == 0 ? 1 : 0;
    if (write(ready[1], &byte, 1) != 1) _exit(1);
    close(done[1]);
    _exit(read(done[0], &byte, 1) == 0 ? 0 : 1);
  }
  char locked = 0;
  ASSERT_EQ(read(ready[0], &locked, 1), 1);
  EXPECT_EQ(locked, 1);
  EXPECT_TRUE(state.HeldByOldCoordinator());
  close(done[1]);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(state.HeldByOldCoordinator());
}

TEST_F(OutputStateTest, DirectoryOfSomebodyElseIsNotTouched) {
  QUERN_ASSERT_OK(MakeDirectories(output_));
  QUERN_ASSERT_OK(WriteFileDurably(output_ + "/thesis.tex", "x"));
  EXPECT_THAT(OutputState::Prepare(output_), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("thesis.tex")));
  EXPECT_FALSE(FileExists(output_ + "/.quern"));
}

TEST_F(OutputStateTest, FileIsNoOutput) {
  QUERN_ASSERT_OK(MakeDirectories(DirName(output_)));
  QUERN_ASSERT_OK(WriteFileDurably(output_, "x"));
  EXPECT_THAT(OutputState::Prepare(output_), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("no directory")));
}

TEST(UserStateTest, FollowsTheXdgVariablesAndDependsOnTheOutput) {
  setenv("XDG_STATE_HOME", "/state", 1);
  QUERN_ASSERT_OK_AND_ASSIGN(std::string one, UserStateDirectory("/mnt/a"));
  QUERN_ASSERT_OK_AND_ASSIGN(std::string two, UserStateDirectory("/mnt/b"));
  EXPECT_EQ(DirName(one), "/state/quern");
  EXPECT_NE(one, two);
  unsetenv("XDG_STATE_HOME");
  setenv("HOME", "/home/me", 1);
  QUERN_ASSERT_OK_AND_ASSIGN(std::string home, UserStateDirectory("/mnt/a"));
  EXPECT_EQ(DirName(home), "/home/me/.local/state/quern");
  unsetenv("HOME");
  EXPECT_THAT(UserStateDirectory("/mnt/a"), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("XDG_STATE_HOME")));
}

TEST(NetworkFilesystemTest, LocalOnesAreNotNetworkOnes) {
  EXPECT_TRUE(IsNetworkFilesystem(0x6969));
  EXPECT_TRUE(IsNetworkFilesystem(0x65735546));
  EXPECT_TRUE(IsNetworkFilesystem(0xFFFFFFFFFF534D42));  // sign-extended, as some kernels report it
  EXPECT_FALSE(IsNetworkFilesystem(0xEF53));             // ext4
  EXPECT_FALSE(IsNetworkFilesystem(0x01021994));         // tmpfs
  EXPECT_FALSE(IsNetworkFilesystem(0x9123683E));         // btrfs
}

}  // namespace
}  // namespace quern::client
