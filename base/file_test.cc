#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

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

TEST(FileTest, WhatIsNoRegularFileIsRefusedAtOnce) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("file_test"));
  const std::string fifo = JoinPath(dir.path(), "fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is no regular file"));
  // Without a reader or writer at its other end.
  for (const int flags : {O_RDONLY, O_WRONLY, O_RDWR, O_RDWR | O_CREAT}) EXPECT_THAT(OpenFile(fifo, flags), refused) << flags;
  EXPECT_THAT(ReadFileToString(fifo), refused);
  EXPECT_THAT(OpenFile("/dev/null", O_RDONLY), refused);
  EXPECT_THAT(OpenFile(dir.path(), O_RDONLY), refused);
  QUERN_EXPECT_OK(OpenFile(dir.path(), O_RDONLY | O_DIRECTORY).status());
  // A regular one blocks as it would have.
  QUERN_ASSERT_OK_AND_ASSIGN(const UniqueFd file, OpenFile(JoinPath(dir.path(), "a"), O_RDWR | O_CREAT));
  EXPECT_EQ(fcntl(file.get(), F_GETFL) & O_NONBLOCK, 0);
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
