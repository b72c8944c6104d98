#include "base/file.h"

#include <errno.h>
#include <fcntl.h>

#include "base/status_matchers.h"

namespace quern {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(FileTest, DurableWriteReplacesAndLeavesNoTemporary) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("file_test"));
  const std::string path = JoinPath(dir.path(), "a");
  QUERN_ASSERT_OK(WriteFileDurably(path, "one"));
  QUERN_ASSERT_OK(WriteFileDurably(path, "two"));
  EXPECT_THAT(ReadFileToString(path), IsOkAndHolds("two"));
  EXPECT_THAT(ListDirectory(dir.path()), IsOkAndHolds(ElementsAre("a")));
}

TEST(FileTest, ReadPastTheEndIsDataLossAndSaysWhere) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("file_test"));
  const std::string path = JoinPath(dir.path(), "a");
  QUERN_ASSERT_OK(WriteFileDurably(path, "12345"));
  QUERN_ASSERT_OK_AND_ASSIGN(UniqueFd fd, OpenFile(path, O_RDONLY));
  char buffer[8];
  EXPECT_THAT(ReadExactly(fd.get(), 2, buffer, 8, path), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("ended at 5")));
}

TEST(FileTest, TooLargeIsNotRead) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("file_test"));
  const std::string path = JoinPath(dir.path(), "a");
  QUERN_ASSERT_OK(WriteFileDurably(path, "12345"));
  EXPECT_THAT(ReadFileToString(path, 4), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("5 bytes")));
}

TEST(FileTest, KernelFilesHaveContentButNoSize) {
  EXPECT_THAT(ReadFileToString("/proc/self/status"), IsOkAndHolds(""));
  EXPECT_THAT(ReadKernelFile("/proc/self/status"), IsOkAndHolds(HasSubstr("VmRSS")));
  EXPECT_THAT(ReadKernelFile("/proc/self/status", 10), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(ReadKernelFile("/proc/self/nothing"), StatusIs(absl::StatusCode::kNotFound));
}

TEST(FileTest, MakeDirectoriesIsIdempotentAndRefusesAFile) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("file_test"));
  QUERN_EXPECT_OK(MakeDirectories(JoinPath(dir.path(), "x/y/z")));
  QUERN_EXPECT_OK(MakeDirectories(JoinPath(dir.path(), "x/y/z")));
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(dir.path(), "f"), ""));
  EXPECT_THAT(MakeDirectories(JoinPath(dir.path(), "f")), StatusIs(absl::StatusCode::kAlreadyExists));
}

TEST(FileTest, FullDiskSaysSo) {
  EXPECT_THAT(ErrnoToStatus(ENOSPC, "write", "/x"), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("disk full")));
}

TEST(FileTest, PathParts) {
  EXPECT_EQ(DirName("/a/b/"), "/a");
  EXPECT_EQ(DirName("a"), ".");
  EXPECT_EQ(DirName("/a"), "/");
  EXPECT_EQ(BaseName("/a/b/"), "b");
  EXPECT_EQ(JoinPath("/a/", "b"), "/a/b");
}

}  // namespace
}  // namespace quern
