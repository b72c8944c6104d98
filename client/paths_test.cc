#include "client/paths.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"
#include "base/status_matchers.h"
#include "client/exit_code.h"

namespace quern::client {
namespace {

using ::testing::HasSubstr;

TEST(PathsTest, RepositoryNames) {
  EXPECT_TRUE(IsRepositoryName("poolside/Laguna-S-2.1"));
  EXPECT_TRUE(IsRepositoryName("a/b@main"));
  EXPECT_TRUE(IsRepositoryName("a/b@refs/pr/3"));
  for (const char* text : {"", "a", "/a", "a/", "/a/b", "a/b/c", "./a", "../a", "a/.b", "a b/c", "a/b@", "-a/b"}) {
    EXPECT_FALSE(IsRepositoryName(text)) << text;
  }
}

TEST(PathsTest, OutputMayNotExistYet) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("paths"));
  QUERN_ASSERT_OK_AND_ASSIGN(std::string real, AbsolutePath(directory.path()));
  EXPECT_THAT(AbsolutePath(directory.path() + "/x/../new/out/"), IsOkAndHolds(real + "/new/out"));
  EXPECT_THAT(AbsolutePath(""), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(PathsTest, LinksAreFollowed) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("paths"));
  QUERN_ASSERT_OK(MakeDirectories(directory.path() + "/real"));
  ASSERT_EQ(symlink("real", (directory.path() + "/link").c_str()), 0);
  QUERN_ASSERT_OK_AND_ASSIGN(std::string real, AbsolutePath(directory.path() + "/real"));
  EXPECT_THAT(AbsolutePath(directory.path() + "/link/out"), IsOkAndHolds(real + "/out"));
}

TEST(PathsTest, LinkToNothingIsRefusedWhereverItStands) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("paths"));
  const std::string link = directory.path() + "/link";
  ASSERT_EQ(symlink("nowhere", link.c_str()), 0);
  for (const std::string& path : {link, link + "/out"}) {
    const absl::Status status = AbsolutePath(path).status();
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("link to nowhere, which does not exist")));
    EXPECT_EQ(ExitCodeOf(status), ExitCode::kFailed);
  }
}

TEST(PathsTest, SourceAndOutputLieApart) {
  QUERN_EXPECT_OK(CheckApart("/a/src", "/a/out"));
  QUERN_EXPECT_OK(CheckApart("/a/src", "/a/src-w4"));
  QUERN_EXPECT_OK(CheckApart("org/name", "/a/out"));
  EXPECT_THAT(CheckApart("/a/src", "/a/src"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is the source")));
  EXPECT_THAT(CheckApart("/a/src", "/a/src/out"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("inside the source")));
  EXPECT_THAT(CheckApart("/a/out/src", "/a/out"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("inside the output")));
}

TEST(PathsTest, LinkToAPathThatIsNoUtf8IsAUsageError) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("paths"));
  QUERN_ASSERT_OK(MakeDirectories(directory.path() + "/real\xFF"));
  ASSERT_EQ(symlink("real\xFF", (directory.path() + "/link").c_str()), 0);
  const absl::Status status = ResolveSource(directory.path() + "/link", false).status();
  EXPECT_EQ(ExitCodeOf(status), ExitCode::kUsage);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("real\\xff")));
}

TEST(PathsTest, SourceIsADirectoryOrARepository) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("paths"));
  QUERN_ASSERT_OK_AND_ASSIGN(std::string real, AbsolutePath(directory.path()));
  EXPECT_THAT(ResolveSource(directory.path(), false), IsOkAndHolds(real));
  EXPECT_THAT(ResolveSource("org/name@main", false), IsOkAndHolds("org/name@main"));
  EXPECT_THAT(ResolveSource("/no/such/model", false), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such/model")));
  EXPECT_THAT(ResolveSource("/no/such/model", true), IsOkAndHolds("/no/such/model"));
  EXPECT_THAT(ResolveSource("../no", true), StatusIs(absl::StatusCode::kNotFound));
}

TEST(PathsTest, ExistingDirectoryIsNeverARepository) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("paths"));
  QUERN_ASSERT_OK_AND_ASSIGN(std::string real, AbsolutePath(directory.path()));
  EXPECT_THAT(ExistingDirectory(directory.path()), IsOkAndHolds(real));
  EXPECT_THAT(ExistingDirectory("no/pe"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("there is no directory no/pe")));
}

TEST(PathsTest, FileIsNoSource) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("paths"));
  const std::string file = directory.path() + "/model.safetensors";
  QUERN_ASSERT_OK(WriteFileDurably(file, "x"));
  EXPECT_THAT(ResolveSource(file, true), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no directory")));
}

}  // namespace
}  // namespace quern::client
