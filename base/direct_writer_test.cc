#include "base/direct_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_matchers.h"

namespace quern {
namespace {

std::string Pattern(size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 131 >> 4);
  return bytes;
}

// In both kinds of directories: /dev/shm is a filesystem in memory, which may refuse direct writes.
TEST(DirectWriterTest, PiecesOfAnySizeMakeTheFile) {
  const TempDir on_disk = TempDir::Make("direct_writer").value();
  for (const std::string& path : {JoinPath(on_disk.path(), "file"), absl::StrCat("/dev/shm/quern_direct_writer_test.", getpid())}) {
    const std::string content = Pattern(3 * kMiB + 12'345);
    UniqueFd fd = OpenFile(path, O_RDWR | O_CREAT | O_TRUNC).value();
    DirectWriter writer;
    uint64_t offset = 0;
    // Whole blocks, a tail that ends inside of one, what begins there, more than the buffer has, and the rest.
    for (const uint64_t size : std::vector<uint64_t>{4096, 8192 + 5, 4091, 2 * kMiB + 7, 1, content.size()}) {
      const uint64_t part = std::min<uint64_t>(size, content.size() - offset);
      QUERN_ASSERT_OK(writer.Write(fd.get(), offset, content.data() + offset, part, path));
      offset += part;
    }
    const absl::StatusOr<std::string> read = ReadFileToString(path);
    QUERN_EXPECT_OK(RemoveFile(path));
    QUERN_ASSERT_OK(read.status());
    EXPECT_EQ(read->size(), content.size());
    EXPECT_TRUE(*read == content) << path;
  }
}

TEST(DirectWriterTest, FailuresNameTheFile) {
  const TempDir directory = TempDir::Make("direct_writer").value();
  const std::string path = JoinPath(directory.path(), "file");
  QUERN_ASSERT_OK(WriteFileDurably(path, "x"));
  UniqueFd fd = OpenFile(path, O_RDONLY).value();
  DirectWriter writer;
  const std::string block(4096, 'x');
  const absl::Status status = writer.Write(fd.get(), 0, block.data(), block.size(), path);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(path));
}

}  // namespace
}  // namespace quern
