#include "worker/io/guarded_copy.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::worker {
namespace {

TEST(GuardedCopyTest, CopiesAndSurvivesATruncatedFile) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir dir, TempDir::Make("guarded"));
  const std::string path = JoinPath(dir.path(), "file");
  QUERN_ASSERT_OK(WriteFileDurably(path, std::string(1 << 16, 'a')));
  QUERN_ASSERT_OK_AND_ASSIGN(const UniqueFd fd, OpenFile(path, O_RDWR));
  void* mapped = mmap(nullptr, 1 << 16, PROT_READ, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  std::string to(1 << 16, 'b');
  EXPECT_TRUE(GuardedCopy(to.data(), mapped, to.size()));
  EXPECT_EQ(to, std::string(1 << 16, 'a'));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  // Twice: the handler stays in place, and the signal is not left blocked.
  EXPECT_FALSE(GuardedCopy(to.data(), mapped, to.size()));
  EXPECT_FALSE(GuardedCopy(to.data(), mapped, to.size()));
  EXPECT_TRUE(GuardedCopy(to.data(), mapped, 4096));
  munmap(mapped, 1 << 16);
}

TEST(GuardedCopyDeathTest, OtherBusErrorsStillKill) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        char byte = 0;
        GuardedCopy(&byte, "x", 1);
        const UniqueFd fd(memfd_create("empty", 0));
        const volatile char* mapped = static_cast<const char*>(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd.get(), 0));
        byte = *mapped;
      },
      "");
}

}  // namespace
}  // namespace quern::worker
