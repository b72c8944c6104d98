#include "worker/io/output_file.h"

#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <random>
#include <thread>
#include <vector>

#include "base/byte_size.h"
#include "base/status_matchers.h"
#include "base/task_memory.h"

namespace quern::worker {
namespace {

using testing::HasSubstr;

class OutputFileTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    QUERN_ASSERT_OK_AND_ASSIGN(pool_, BufferPool::Create(PoolLayout::For(kMinimumTaskMemory, {.output = true})));
    if (GetParam()) {
      QUERN_ASSERT_OK_AND_ASSIGN(uring_, Uring::Create(16));
    }
  }

  absl::StatusOr<std::unique_ptr<OutputFile>> Create(uint64_t size) {
    OutputFile::Options options;
    options.path = path_;
    options.size = size;
    options.pool = pool_.get();
    options.uring = uring_.get();
    options.bytes_written = &bytes_written_;
    options.on_error = [](const absl::Status& status) { ADD_FAILURE() << status; };
    return OutputFile::Create(std::move(options));
  }

  const TempDir dir_ = TempDir::Make("output").value();
  std::string path_ = JoinPath(dir_.path(), "file");
  std::unique_ptr<Uring> uring_;
  std::unique_ptr<BufferPool> pool_;
  std::atomic<uint64_t> bytes_written_{0};
};

std::string Bytes(uint64_t size, int seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

TEST_P(OutputFileTest, BytesPlacedInAnyOrderByThreadsArriveHashed) {
  for (const uint64_t size : {uint64_t{1}, uint64_t{4096}, 256 * kKiB, 256 * kKiB + 1, 40 * kMiB + 777}) {
    const std::string content = Bytes(size, static_cast<int>(size));
    bytes_written_ = 0;
    QUERN_ASSERT_OK_AND_ASSIGN(std::unique_ptr<OutputFile> file, Create(size));
    std::mt19937 random(1);
    uint64_t at = 0;
    while (at < size) {
      // A few parts at once, completed by threads in reverse order.
      std::vector<std::thread> threads;
      std::vector<std::pair<uint64_t, uint64_t>> parts;
      for (int i = 0; i < 4 && at < size; ++i) {
        const uint64_t part = std::min<uint64_t>(size - at, 1 + random() % (300 * kKiB));
        while (!file->Reserve(part, absl::Seconds(1))) {
        }
        parts.emplace_back(at, part);
        at += part;
      }
      for (auto it = parts.rbegin(); it != parts.rend(); ++it) {
        threads.emplace_back([&, from = it->first, part = it->second] {
          memcpy(file->At(from), content.data() + from, part);
          file->Complete(from, part);
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    while (!file->Drained(absl::Seconds(1))) {
    }
    EXPECT_THAT(file->Finish(), IsOkAndHolds(Sha256Of(content)));
    file.reset();
    EXPECT_EQ(bytes_written_, size);
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string read, ReadFileToString(path_));
    EXPECT_TRUE(read == content) << size;
    QUERN_ASSERT_OK(RemoveFile(path_));
  }
}

TEST_P(OutputFileTest, AnUnfinishedFileIsRemoved) {
  QUERN_ASSERT_OK_AND_ASSIGN(std::unique_ptr<OutputFile> file, Create(10 * kMiB));
  ASSERT_TRUE(file->Reserve(kMiB, absl::ZeroDuration()));
  memset(file->At(0), 1, kMiB);
  file->Complete(0, kMiB);
  EXPECT_TRUE(FileExists(path_));
  EXPECT_FALSE(file->Drained(absl::ZeroDuration()));
  file.reset();
  EXPECT_FALSE(FileExists(path_));
}

TEST_P(OutputFileTest, AFileThatExistsIsLeftAlone) {
  QUERN_ASSERT_OK(WriteFileDurably(path_, "mine"));
  EXPECT_THAT(Create(100), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(path_)));
  EXPECT_THAT(ReadFileToString(path_), IsOkAndHolds(std::string("mine")));
}

TEST_P(OutputFileTest, TheDirectoryThatTheFileWasMadeInIsTheOneItIsRemovedFrom) {
  const std::string directory = JoinPath(dir_.path(), "attempts"), moved = JoinPath(dir_.path(), "moved");
  QUERN_ASSERT_OK(MakeDirectories(directory));
  path_ = JoinPath(directory, "file");
  QUERN_ASSERT_OK_AND_ASSIGN(std::unique_ptr<OutputFile> file, Create(kMiB));
  QUERN_ASSERT_OK(RenameFile(directory, moved));
  QUERN_ASSERT_OK(MakeDirectories(JoinPath(dir_.path(), "victim")));
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(dir_.path(), "victim/file"), "mine"));
  ASSERT_EQ(symlink("victim", directory.c_str()), 0);
  file.reset();
  EXPECT_THAT(ReadFileToString(path_), IsOkAndHolds(std::string("mine")));
  EXPECT_FALSE(FileExists(JoinPath(moved, "file")));
}

TEST_P(OutputFileTest, TheWindowIsBounded) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<OutputFile> file, Create(100 * kMiB));
  ASSERT_TRUE(file->Reserve(file->MaxReserve(), absl::ZeroDuration()));
  EXPECT_FALSE(file->Reserve(pool_->layout().chunk + 1, absl::Milliseconds(1)));
}

INSTANTIATE_TEST_SUITE_P(Ways, OutputFileTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) { return info.param ? "Direct" : "Buffered"; });

TEST(OutputFileDiskTest, AFullDiskIsFoundBeforeTheFirstByte) {
  // A tmpfs refuses at once what is larger than itself.
  struct statvfs info;
  if (statvfs("/dev/shm", &info) != 0) GTEST_SKIP() << "no /dev/shm here";
  QUERN_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<BufferPool> pool,
                             BufferPool::Create(PoolLayout::For(kMinimumTaskMemory, {.output = true})));
  OutputFile::Options options;
  options.path = "/dev/shm/quern-output-file-test";
  options.size = uint64_t{info.f_blocks} * info.f_frsize + kGiB;
  options.pool = pool.get();
  EXPECT_THAT(OutputFile::Create(options), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("disk full")));
  EXPECT_FALSE(FileExists(options.path));
}

}  // namespace
}  // namespace quern::worker
