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
  QUERN_EXPECT_OK(GuardedCopy(to.data(), mapped, to.size()));
  EXPECT_EQ(to, std::string(1 << 16, 'a'));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  EXPECT_THAT(GuardedCopy(to.data(), mapped, to.size()), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT(GuardedCopy(to.data(), static_cast<char*>(mapped) + 8192, 1), StatusIs(absl::StatusCode::kDataLoss));
  QUERN_EXPECT_OK(GuardedCopy(to.data(), mapped, 4096));
  munmap(mapped, 1 << 16);
}

}  // namespace
}  // namespace quern::worker
