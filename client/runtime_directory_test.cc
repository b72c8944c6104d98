#include "client/runtime_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <optional>

#include "base/status_matchers.h"

namespace quern::client {
namespace {

TEST(RuntimeDirectoryTest, IsPrivateAndRemovedAtTheEnd) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir base, TempDir::Make("runtime"));
  std::string path;
  {
    QUERN_ASSERT_OK_AND_ASSIGN(RuntimeDirectory directory, RuntimeDirectory::Make(base.path()));
    path = directory.path();
    struct stat info;
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
    QUERN_ASSERT_OK(WriteFileDurably(path + "/quernd.log", "x"));
  }
  EXPECT_FALSE(FileExists(path));
}

TEST(RuntimeDirectoryTest, DirectoriesOfDeadCommandsAreRemovedAndThoseOfLiveOnesStay) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir base, TempDir::Make("runtime"));
  QUERN_ASSERT_OK_AND_ASSIGN(RuntimeDirectory live, RuntimeDirectory::Make(base.path()));
  // As a killed command leaves it: the lock file without a lock.
  const std::string dead = base.path() + "/quern-run-aaaaaa";
  QUERN_ASSERT_OK(MakeDirectories(dead));
  QUERN_ASSERT_OK(WriteFileDurably(dead + "/lock", ""));
  // One that is being made has no lock file yet.
  const std::string young = base.path() + "/quern-run-bbbbbb";
  QUERN_ASSERT_OK(MakeDirectories(young));
  const std::string other = base.path() + "/someone-elses";
  QUERN_ASSERT_OK(MakeDirectories(other));

  QUERN_ASSERT_OK_AND_ASSIGN(RuntimeDirectory next, RuntimeDirectory::Make(base.path()));
  EXPECT_FALSE(FileExists(dead));
  EXPECT_TRUE(FileExists(live.path()));
  EXPECT_TRUE(FileExists(young));
  EXPECT_TRUE(FileExists(other));
}

class RuntimeBaseTest : public testing::Test {
 protected:
  RuntimeBaseTest() {
    if (const char* value = getenv("XDG_RUNTIME_DIR")) saved_ = value;
  }
  ~RuntimeBaseTest() override {
    if (saved_) {
      setenv("XDG_RUNTIME_DIR", saved_->c_str(), 1);
    } else {
      unsetenv("XDG_RUNTIME_DIR");
    }
  }
  std::optional<std::string> saved_;
};

TEST_F(RuntimeBaseTest, UsesTheUsersDirectoryWhereASocketNameFits) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir base, TempDir::Make("runtime"));
  setenv("XDG_RUNTIME_DIR", base.path().c_str(), 1);
  EXPECT_EQ(RuntimeBase(), base.path());

  const std::string deep = base.path() + "/" + std::string(90, 'x');
  QUERN_ASSERT_OK(MakeDirectories(deep));
  setenv("XDG_RUNTIME_DIR", deep.c_str(), 1);
  EXPECT_EQ(RuntimeBase(), "/tmp");
}

TEST_F(RuntimeBaseTest, FallsBackWhereThereIsNone) {
  unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(RuntimeBase(), "/tmp");
  setenv("XDG_RUNTIME_DIR", "/no/such/directory", 1);
  EXPECT_EQ(RuntimeBase(), "/tmp");
  setenv("XDG_RUNTIME_DIR", "relative", 1);
  EXPECT_EQ(RuntimeBase(), "/tmp");
}

}  // namespace
}  // namespace quern::client
