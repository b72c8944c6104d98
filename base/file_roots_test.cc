#include "base/file_roots.h"

#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern {
namespace {

// T/in is a root, T/other another, T/out holds what nobody may see.
class FileRootsTest : public testing::TestWithParam<FileRoots::Lookup> {
 protected:
  void SetUp() override {
    for (const char* name : {"in", "in/a", "in/a/b", "other", "out", "insider"}) QUERN_ASSERT_OK(MakeDirectories(T(name)));
    QUERN_ASSERT_OK(WriteFileDurably(T("in/a/file"), "inside"));
    QUERN_ASSERT_OK(WriteFileDurably(T("other/file"), "other"));
    QUERN_ASSERT_OK(WriteFileDurably(T("out/secret"), "secret"));
    QUERN_ASSERT_OK(WriteFileDurably(T("insider/file"), "secret"));
    Link("b/../file", "in/a/relative");
    Link(T("in/a/file"), "in/absolute");
    Link(T("other"), "in/to_other");
    Link("../out/secret", "in/up");
    Link(T("out"), "in/out");
    Link("loop", "in/loop");
    Link("nothing", "in/broken");
    Link("/proc/self/root", "in/magic");
    QUERN_ASSERT_OK_AND_ASSIGN(roots_, FileRoots::Open({T("in"), T("other/")}, GetParam()));
  }

  std::string T(const std::string& name) { return JoinPath(directory_.path(), name); }
  void Link(const std::string& target, const std::string& name) { ASSERT_EQ(symlink(target.c_str(), T(name).c_str()), 0); }

  // The content, or the name of errno.
  std::string Read(const std::string& path) {
    const UniqueFd fd(roots_->OpenFile(path, O_RDONLY, 0));
    if (!fd) return strerrorname_np(errno);
    char content[64];
    const ssize_t size = read(fd.get(), content, sizeof(content));
    return size < 0 ? strerrorname_np(errno) : std::string(content, size);
  }

  TempDir directory_ = *TempDir::Make("quern-roots-test");
  std::shared_ptr<const FileRoots> roots_;
};

TEST_P(FileRootsTest, WhatIsBelowIsOpenedThroughLinksThatStay) {
  EXPECT_EQ(Read(T("in/a/file")), "inside");
  EXPECT_EQ(Read(T("in//a/./b/../file")), "inside");
  EXPECT_EQ(Read(T("in/a/relative")), "inside");
  EXPECT_EQ(Read(T("in/absolute")), "inside");
  EXPECT_EQ(Read(T("in/to_other/file")), "other");
  EXPECT_EQ(Read(T("in/a")), "EISDIR");
  EXPECT_EQ(Read(T("in")), "EISDIR");
  EXPECT_EQ(Read(T("in/a/none")), "ENOENT");
  EXPECT_EQ(Read(T("in/a/file/x")), "ENOTDIR");
  EXPECT_EQ(Read(T("in/loop")), "ELOOP");
}

TEST_P(FileRootsTest, LinksAreRefusedWhereTheyAreNotWanted) {
  const auto open = [this](const std::string& name, int flags) {
    const UniqueFd fd(roots_->OpenFile(T(name), flags, 0600, FileRoots::Links::kRefuse));
    return fd ? "opened" : strerrorname_np(errno);
  };
  EXPECT_STREQ(open("in/a/file", O_RDONLY), "opened");
  EXPECT_STREQ(open("in/a/b/../file", O_RDONLY), "opened");
  EXPECT_STREQ(open("in/a/new", O_WRONLY | O_CREAT | O_EXCL), "opened");
  EXPECT_STREQ(open("in/a/none", O_RDONLY), "ENOENT");
  for (const char* name : {"in/a/relative", "in/absolute", "in/to_other/file", "in/to_other", "in/broken", "in/loop"}) {
    EXPECT_STREQ(open(name, O_RDONLY), "ELOOP") << name;
  }
  EXPECT_STREQ(open("in/to_other/new", O_WRONLY | O_CREAT | O_EXCL), "ELOOP");
  EXPECT_STREQ(open("in/broken", O_WRONLY | O_CREAT), "ELOOP");
  EXPECT_FALSE(FileExists(T("other/new")));
  EXPECT_FALSE(FileExists(T("in/nothing")));
}

TEST_P(FileRootsTest, NothingLeadsOut) {
  for (const char* path : {"in/../out/secret", "in/a/../../out/secret", "in/a/b/../../../../../../../../../../etc/passwd", "in/..", "in/up",
                           "in/out/secret", "in/out/none", "in/out", "in/magic/etc/passwd", "out/secret", "insider/file", "out/none"}) {
    EXPECT_EQ(Read(T(path)), "EXDEV") << path;
    EXPECT_EQ(roots_->Resolve(T(path)).error, EXDEV) << path;
  }
  EXPECT_EQ(Read("in/a/file"), "EXDEV");
  EXPECT_EQ(Read(""), "EXDEV");
  EXPECT_EQ(Read("/etc/passwd"), "EXDEV");
  EXPECT_EQ(Read(T("in/a/file") + std::string("\0x", 2)), "EINVAL");
  EXPECT_TRUE(roots_->Holds(T("in")));
  EXPECT_TRUE(roots_->Holds(T("in/x/../..")));
  EXPECT_FALSE(roots_->Holds(T("insider")));
}

TEST_P(FileRootsTest, FilesAreMadeBelowAndNowhereElse) {
  const auto make = [&](const std::string& path) { return UniqueFd(roots_->OpenFile(T(path), O_WRONLY | O_CREAT | O_EXCL, 0600)); };
  EXPECT_TRUE(make("in/a/new"));
  EXPECT_TRUE(FileExists(T("in/a/new")));
  EXPECT_FALSE(make("in/a/new"));
  EXPECT_EQ(errno, EEXIST);
  EXPECT_FALSE(make("in/out/new"));
  EXPECT_EQ(errno, EXDEV);
  EXPECT_FALSE(make("in/../out/new"));
  EXPECT_EQ(errno, EXDEV);
  EXPECT_FALSE(FileExists(T("out/new")));
  EXPECT_FALSE(make("in/no/new"));
  EXPECT_EQ(errno, ENOENT);
}

TEST_P(FileRootsTest, PathsResolveAsFarAsTheyExist) {
  const std::string in = T("in");
  EXPECT_EQ(roots_->Resolve(T("in/a/relative")).path, JoinPath(in, "a/file"));
  EXPECT_EQ(roots_->Resolve(T("in/to_other/x/y/./z")).path, T("other/x/y/z"));
  EXPECT_EQ(roots_->Resolve(T("in/")).path, in);
  EXPECT_EQ(roots_->Resolve(T("in/new/deep")).path, JoinPath(in, "new/deep"));
  EXPECT_FALSE(roots_->Resolve(T("in/new/deep")).broken_link);
  EXPECT_TRUE(roots_->Resolve(T("in/broken")).broken_link);
  EXPECT_TRUE(roots_->Resolve(T("in/new/../../out")).up_behind_missing);
}

TEST_P(FileRootsTest, ARootIsTheDirectoryThatWasOpened) {
  ASSERT_EQ(rename(T("in").c_str(), T("moved").c_str()), 0);
  Link(T("out"), "in");
  EXPECT_EQ(Read(T("in/secret")), "ENOENT");
  EXPECT_EQ(Read(T("in/a/file")), "inside");
}

// A directory and a link that leads out change places all the time; what is read is never what lies outside.
TEST_P(FileRootsTest, RacesWithRenameDoNotLeadOut) {
  QUERN_ASSERT_OK(MakeDirectories(T("in/swap")));
  QUERN_ASSERT_OK(WriteFileDurably(T("in/swap/secret"), "inside"));
  Link(T("out"), "in/spare");
  std::atomic<bool> done{false};
  std::thread attacker([&] {
    while (!done) {
      if (renameat2(AT_FDCWD, T("in/swap").c_str(), AT_FDCWD, T("in/spare").c_str(), RENAME_EXCHANGE) != 0) return;
    }
  });
  int inside = 0, refused = 0;
  for (int i = 0; i < 20000 && (i < 2000 || inside == 0 || refused == 0); ++i) {
    const std::string content = Read(T("in/swap/secret"));
    ASSERT_NE(content, "secret");
    inside += content == "inside";
    refused += content == "EXDEV";
  }
  done = true;
  attacker.join();
  EXPECT_GT(inside, 0);
  EXPECT_GT(refused, 0);
}

TEST_P(FileRootsTest, ConfinedCallsStayBelow) {
  const FileConfinement confinement(roots_);
  EXPECT_THAT(ReadFileToString(T("in/a/relative")), IsOkAndHolds("inside"));
  EXPECT_THAT(ReadFileToString(T("in/up")).status(), StatusIs(absl::StatusCode::kPermissionDenied));
  // Not spelled below a root: the program's own.
  EXPECT_THAT(ReadFileToString(T("out/secret")), IsOkAndHolds("secret"));
  for (const absl::Status& status :
       {WriteFileDurably(T("in/out/x"), "x"), RemoveFile(T("in/out/secret")), RemoveTree(T("in/out/secret")),
        MakeDirectories(T("in/out/d/e")), RenameFile(T("in/a/file"), T("in/out/file")), RenameFile(T("in/out/secret"), T("in/secret")),
        ListDirectory(T("in/out")).status(), FileSize(T("in/out/secret")).status(), SyncDirectory(T("in/out")),
        RemoveFile(T("in/a/../../out/secret")), RemoveFile(T("in/a/b/.."))}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kPermissionDenied));
  }
  EXPECT_FALSE(FileExists(T("in/out/secret")));
  struct stat info;
  EXPECT_EQ(ConfinedLstat(T("in/out"), &info), 0);
  EXPECT_TRUE(S_ISLNK(info.st_mode));
  char target[16];
  EXPECT_EQ(ConfinedReadlink(T("in/loop"), target, sizeof(target)), 4);
  QUERN_EXPECT_OK(MakeDirectories(T("in/x/y/z")));
  QUERN_EXPECT_OK(WriteFileDurably(T("in/x/y/file"), "x"));
  QUERN_EXPECT_OK(RenameFile(T("in/x/y/file"), T("in/x/file")));
  EXPECT_THAT(ListDirectory(T("in/x")), IsOkAndHolds(testing::ElementsAre("file", "y")));
  QUERN_EXPECT_OK(RemoveTree(T("in/x")));
  EXPECT_FALSE(FileExists(T("in/x")));
  QUERN_EXPECT_OK(RemoveTree(T("in/x")));
  EXPECT_THAT(ReadFileToString(T("out/secret")), IsOkAndHolds("secret"));
}

TEST_P(FileRootsTest, ATreeIsRemovedWithoutFollowingLinks) {
  const FileConfinement confinement(roots_);
  QUERN_EXPECT_OK(RemoveTree(T("in/out")));
  QUERN_EXPECT_OK(RemoveTree(T("in/a")));
  EXPECT_TRUE(FileExists(T("out/secret")));
  EXPECT_TRUE(FileExists(T("other/file")));
  EXPECT_FALSE(FileExists(T("in/a")));
}

INSTANTIATE_TEST_SUITE_P(Lookups, FileRootsTest, testing::Values(FileRoots::Lookup::kKernel, FileRoots::Lookup::kSteps),
                         [](const auto& info) { return info.param == FileRoots::Lookup::kKernel ? "Kernel" : "Steps"; });

TEST(FileRootsOfEverythingTest, TheRootOfAllHoldsEverything) {
  QUERN_ASSERT_OK_AND_ASSIGN(const auto roots, FileRoots::Open({"/"}));
  EXPECT_TRUE(roots->Holds("/"));
  EXPECT_TRUE(roots->Holds("/etc/passwd"));
  EXPECT_EQ(roots->Resolve("/../etc/./passwd").path, "/etc/passwd");
  EXPECT_TRUE(UniqueFd(roots->OpenFile("/../etc/passwd", O_RDONLY, 0)));
  EXPECT_THAT(FileRoots::Open({"/etc/passwd"}).status(), testing::Not(IsOk()));
}

// T/tree/out is written to; T/victim has the same names.
class LinklessTreeTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    for (const char* name : {"tree/out/dir", "victim/dir"}) QUERN_ASSERT_OK(MakeDirectories(T(name)));
    for (const char* name : {"tree/out/dir/file", "victim/dir/file"}) QUERN_ASSERT_OK(WriteFileDurably(T(name), "old"));
    if (GetParam()) {
      QUERN_ASSERT_OK_AND_ASSIGN(auto roots, FileRoots::Open({T("")}));
      confinement_.emplace(std::move(roots));
    }
    QUERN_ASSERT_OK_AND_ASSIGN(LinklessTree tree, LinklessTree::Open("/", T("tree/out")));
    tree_.emplace(std::move(tree));
  }

  std::string T(const std::string& name) { return JoinPath(directory_.path(), name); }
  // A link to `target` takes the place of `name`.
  void Plant(const std::string& target, const std::string& name) {
    QUERN_ASSERT_OK(RenameFile(T(name), T("away")));
    ASSERT_EQ(symlink(T(target).c_str(), T(name).c_str()), 0);
  }
  void Unplant(const std::string& name) {
    ASSERT_EQ(unlink(T(name).c_str()), 0);
    ASSERT_EQ(rename(T("away").c_str(), T(name).c_str()), 0);
  }

  TempDir directory_ = *TempDir::Make("quern-linkless-test");
  std::optional<FileConfinement> confinement_;
  std::optional<LinklessTree> tree_;
};

TEST_P(LinklessTreeTest, NothingIsWrittenOrRemovedBehindALink) {
  const auto refused = StatusIs(absl::StatusCode::kPermissionDenied, testing::HasSubstr("symbolic link"));
  for (const auto& [target, name] : {std::pair("victim/dir", "tree/out/dir"), std::pair("victim", "tree/out")}) {
    SCOPED_TRACE(name);
    Plant(target, name);
    EXPECT_THAT(OpenFile(T("tree/out/dir/new"), O_WRONLY | O_CREAT), refused);
    EXPECT_THAT(OpenFile(T("tree/out/dir/file"), O_RDONLY), refused);
    EXPECT_THAT(WriteFileDurably(T("tree/out/dir/file"), "new"), refused);
    EXPECT_THAT(RemoveFile(T("tree/out/dir/file")), refused);
    EXPECT_THAT(RenameFile(T("tree/out/dir/file"), T("moved")), refused);
    EXPECT_THAT(RenameFile(T("away"), T("tree/out/dir/moved")), refused);
    EXPECT_THAT(MakeDirectories(T("tree/out/dir/new")), refused);
    EXPECT_THAT(ListDirectory(T("tree/out/dir")), refused);
    EXPECT_FALSE(FileExists(T("tree/out/dir/file")));
    EXPECT_THAT(FileSize(T("tree/out/dir/file")), refused);
    EXPECT_THAT(ReadFileToString(T("victim/dir/file")), IsOkAndHolds("old"));
    EXPECT_THAT(ListDirectory(T("victim/dir")), IsOkAndHolds(testing::ElementsAre("file")));
    Unplant(name);
  }
  EXPECT_THAT(ReadFileToString(T("tree/out/dir/file")), IsOkAndHolds("old"));
  EXPECT_THAT(WriteFileDurably(T("tree/out/dir/file"), "new"), IsOk());
  EXPECT_THAT(RemoveTree(T("tree/out")), IsOk());
}

TEST_P(LinklessTreeTest, RemovingATreeRemovesTheLinkAndNotWhatItLeadsTo) {
  Plant("victim/dir", "tree/out/dir");
  EXPECT_THAT(RemoveTree(T("tree/out/dir")), IsOk());
  EXPECT_THAT(ReadFileToString(T("victim/dir/file")), IsOkAndHolds("old"));
  ASSERT_EQ(rename(T("away").c_str(), T("tree/out/dir").c_str()), 0);
  Plant("victim", "tree/out");
  EXPECT_THAT(RemoveTree(T("tree/out/dir")), StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(ReadFileToString(T("victim/dir/file")), IsOkAndHolds("old"));
}

TEST_P(LinklessTreeTest, DirectoriesAboveItAreNotMadeBehindALink) {
  QUERN_ASSERT_OK_AND_ASSIGN(const LinklessTree deep, LinklessTree::Open("/", T("tree/new/out")));
  ASSERT_EQ(symlink(T("victim").c_str(), T("tree/new").c_str()), 0);
  EXPECT_THAT(MakeDirectories(T("tree/new/out/.quern")), testing::Not(IsOk()));
  EXPECT_THAT(ListDirectory(T("victim")), IsOkAndHolds(testing::ElementsAre("dir")));
}

TEST_P(LinklessTreeTest, OtherPathsAndLaterOnesFollowLinks) {
  ASSERT_EQ(symlink(T("victim").c_str(), T("tree/outside").c_str()), 0);
  EXPECT_THAT(ReadFileToString(T("tree/outside/dir/file")), IsOkAndHolds("old"));
  Plant("victim/dir", "tree/out/dir");
  tree_.reset();
  EXPECT_THAT(ReadFileToString(T("tree/out/dir/file")), IsOkAndHolds("old"));
}

INSTANTIATE_TEST_SUITE_P(UnderAConfinement, LinklessTreeTest, testing::Bool());

TEST(LinklessTreeRootTest, TheRootItselfMayBeALink) {
  const TempDir directory = *TempDir::Make("quern-linkless-test");
  QUERN_ASSERT_OK(MakeDirectories(JoinPath(directory.path(), "disk/out")));
  const std::string mount = JoinPath(directory.path(), "mount");
  ASSERT_EQ(symlink("disk", mount.c_str()), 0);
  const std::string file = JoinPath(mount, "out/file");
  {
    QUERN_ASSERT_OK_AND_ASSIGN(const LinklessTree tree, LinklessTree::Open(mount, JoinPath(mount, "out")));
    EXPECT_THAT(WriteFileDurably(file, "new"), IsOk());
  }
  QUERN_ASSERT_OK_AND_ASSIGN(const LinklessTree tree, LinklessTree::Open("/", JoinPath(mount, "out")));
  EXPECT_THAT(OpenFile(file, O_RDONLY), StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(LinklessTree::Open(mount, "/elsewhere"), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(LinklessTree::Open("/", "here"), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace quern
