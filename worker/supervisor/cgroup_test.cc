#include "worker/supervisor/cgroup.h"

#include <string>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;

constexpr char kV2Mount[] = "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr char kHybridMounts[] =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

TEST(CgroupTest, VersionTwo) {
  EXPECT_THAT(FindMemoryCgroup("0::/system.slice/quern-worker.service\n", kV2Mount),
              IsOkAndHolds(MemoryCgroup{2, "/sys/fs/cgroup/system.slice/quern-worker.service", "/sys/fs/cgroup"}));
}

TEST(CgroupTest, VersionOneWinsWhereBothAreMounted) {
  EXPECT_THAT(FindMemoryCgroup("9:name=systemd:/x\n4:memory:/jobs/17\n1:cpu:/\n0::/other\n", kHybridMounts),
              IsOkAndHolds(MemoryCgroup{1, "/sys/fs/cgroup/memory/jobs/17", "/sys/fs/cgroup/memory"}));
}

TEST(CgroupTest, ControllersMountedTogether) {
  EXPECT_THAT(FindMemoryCgroup("4:cpuset,memory:/a\n", "35 31 0:32 / /cg/both rw - cgroup cgroup rw,cpuset,memory\n"),
              IsOkAndHolds(MemoryCgroup{1, "/cg/both/a", "/cg/both"}));
}

TEST(CgroupTest, RootCgroupIsTheMountPoint) {
  EXPECT_THAT(FindMemoryCgroup("4:memory:/\n", kHybridMounts),
              IsOkAndHolds(MemoryCgroup{1, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory"}));
}

TEST(CgroupTest, ContainerSeesOnlyItsPartOfTheHierarchy) {
  const std::string mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime master:14 - cgroup cgroup rw,memory\n";
  EXPECT_THAT(FindMemoryCgroup("4:memory:/docker/abc/inner\n", mounts),
              IsOkAndHolds(MemoryCgroup{1, "/sys/fs/cgroup/memory/inner", "/sys/fs/cgroup/memory"}));
  EXPECT_THAT(FindMemoryCgroup("4:memory:/docker/abc\n", mounts),
              IsOkAndHolds(MemoryCgroup{1, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory"}));
  // Another container's path, though it begins alike.
  EXPECT_THAT(FindMemoryCgroup("4:memory:/docker/abcdef\n", mounts),
              IsOkAndHolds(MemoryCgroup{1, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory"}));
}

TEST(CgroupTest, PathOutsideTheNamespaceIsTheMountPoint) {
  EXPECT_THAT(FindMemoryCgroup("0::/../other\n", kV2Mount), IsOkAndHolds(MemoryCgroup{2, "/sys/fs/cgroup", "/sys/fs/cgroup"}));
}

TEST(CgroupTest, EscapedMountPointAndColonInPath) {
  EXPECT_THAT(FindMemoryCgroup("0::/a:b\n", "29 23 0:26 / /mnt/c\\040g rw - cgroup2 none rw\n"),
              IsOkAndHolds(MemoryCgroup{2, "/mnt/c g/a:b", "/mnt/c g"}));
}

TEST(CgroupTest, NothingMountedIsNotFound) {
  EXPECT_THAT(FindMemoryCgroup("0::/\n", "1 0 8:1 / / rw - ext4 /dev/sda rw\n"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(FindMemoryCgroup("", ""), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(FindMemoryCgroup("nonsense\n4:memory\n", "a b c - cgroup2\n"), StatusIs(absl::StatusCode::kNotFound));
}

TEST(CgroupTest, OomKillsOfBothVersionsAndOfTheMachine) {
  EXPECT_THAT(ParseOomKills("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), IsOkAndHolds(uint64_t{3}));
  EXPECT_THAT(ParseOomKills("low 0\nhigh 12\nmax 90\noom 4\noom_kill 2\noom_group_kill 0\n"), IsOkAndHolds(uint64_t{2}));
  EXPECT_THAT(ParseOomKills("nr_free_pages 1\noom_kill 7\n"), IsOkAndHolds(uint64_t{7}));
  EXPECT_THAT(ParseOomKills("oom_kill_disable 0\nunder_oom 0\n"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(ParseOomKills("oom_kill many\n"), StatusIs(absl::StatusCode::kNotFound));
}

TEST(CgroupTest, Limits) {
  EXPECT_EQ(ParseMemoryLimit("314572800\n"), 314572800u);
  EXPECT_EQ(ParseMemoryLimit("max\n"), std::nullopt);
  EXPECT_EQ(ParseMemoryLimit("9223372036854771712\n"), std::nullopt);
  EXPECT_EQ(ParseMemoryLimit(""), std::nullopt);
}

TEST(CgroupTest, WatchReadsTheCounterAndTheSmallestLimitAbove) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("cgroup_test"));
  const std::string inner = JoinPath(dir.path(), "a/b");
  QUERN_ASSERT_OK(MakeDirectories(inner));
  const auto write = [](const std::string& path, const char* text) { QUERN_ASSERT_OK(WriteFileDurably(path, text)); };
  write(JoinPath(inner, "memory.events"), "oom 1\noom_kill 1\n");
  write(JoinPath(inner, "memory.max"), "max\n");
  write(JoinPath(dir.path(), "a/memory.max"), "314572800\n");
  const OomWatch watch(JoinPath(inner, "memory.events"), MemoryCgroup{2, inner, dir.path()});
  EXPECT_EQ(watch.Kills(), 1u);
  EXPECT_THAT(watch.DescribeLimit(), HasSubstr("300 MiB of cgroup"));
  write(JoinPath(inner, "memory.events"), "oom 2\noom_kill 2\n");
  EXPECT_EQ(watch.Kills(), 2u);
}

TEST(CgroupTest, WithoutACgroupTheLimitIsTheMachines) {
  const OomWatch watch("/nonexistent", std::nullopt);
  EXPECT_EQ(watch.Kills(), 0u);
  EXPECT_EQ(watch.DescribeLimit(), "the machine's memory");
}

}  // namespace
}  // namespace quern::worker
