#include "worker/io/source_reader.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/mutex.h"
#include "base/status_matchers.h"

namespace quern::worker {
namespace {

using testing::HasSubstr;

// Memory aligned for direct I/O.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(uint64_t size) : data_(static_cast<std::byte*>(aligned_alloc(kIoBlock, size))) {}
  ~AlignedBuffer() { free(data_); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* const data_;
};

class SourceReaderTest : public testing::TestWithParam<ReaderMode> {
 protected:
  void SetUp() override {
    QUERN_ASSERT_OK_AND_ASSIGN(uring_, Uring::Create(8));
    QUERN_ASSERT_OK_AND_ASSIGN(reader_, NewSourceReader(GetParam(), uring_.get()));
    content_.resize(3 * kMiB + 1234);
    std::mt19937 random(3);
    for (char& byte : content_) byte = static_cast<char>(random());
    path_ = JoinPath(dir_.path(), "file");
    QUERN_ASSERT_OK(WriteFileDurably(path_, content_));
  }

  static TempDir MakeDir() { return TempDir::Make("reader").value(); }

  absl::StatusOr<SourceHandle> Open() { return OpenSource(path_, GetParam() != ReaderMode::kMmap, GetParam() == ReaderMode::kDirect); }

  // Blocks until the range was read.
  absl::StatusOr<std::string> Read(const SourceHandle& handle, uint64_t offset, uint64_t size) {
    AlignedBuffer buffer(BufferFor(offset, size));
    Mutex mutex;
    CondVar changed;
    bool ended = false;
    absl::Status result;
    reader_->Read({&handle, offset, size, buffer.data(), [&](absl::Status status) {
                     MutexLock lock(&mutex);
                     result = std::move(status);
                     ended = true;
                     changed.Signal();
                   }});
    MutexLock lock(&mutex);
    while (!ended) changed.Wait(&mutex);
    if (!result.ok()) return result;
    return std::string(reinterpret_cast<const char*>(buffer.data() + offset % kIoBlock), size);
  }

  const TempDir dir_ = MakeDir();
  std::string path_;
  std::string content_;
  std::unique_ptr<Uring> uring_;
  std::unique_ptr<SourceReader> reader_;
};

TEST_P(SourceReaderTest, ReadsAnyRange) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SourceHandle handle, Open());
  EXPECT_EQ(handle.size, content_.size());
  std::mt19937 random(5);
  for (int i = 0; i < 60; ++i) {
    const uint64_t offset = random() % content_.size();
    const uint64_t size = 1 + random() % std::min<uint64_t>(content_.size() - offset, i % 2 == 0 ? 5000 : 2 * kMiB);
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string read, Read(handle, offset, size));
    ASSERT_EQ(read, content_.substr(offset, size)) << offset << " " << size;
  }
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string last, Read(handle, content_.size() - 1, 1));
  EXPECT_EQ(last, content_.substr(content_.size() - 1));
}

TEST_P(SourceReaderTest, AFileThatShrankIsDataLossNamingItAndTheOffset) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SourceHandle handle, Open());
  ASSERT_EQ(truncate(path_.c_str(), kMiB + 100), 0);
  EXPECT_THAT(Read(handle, 2 * kMiB, kMiB), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(path_)));
  EXPECT_THAT(Read(handle, kMiB - 1000, kMiB), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("ended at")));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string read, Read(handle, 5, 1000));
  EXPECT_EQ(read, content_.substr(5, 1000));
}

TEST_P(SourceReaderTest, ManyReadsAtOnce) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SourceHandle handle, Open());
  constexpr int kReads = 500;
  constexpr uint64_t kSize = 6000;
  AlignedBuffer buffer(kReads * 3 * kIoBlock);
  Mutex mutex;
  CondVar changed;
  int ended = 0;
  for (int i = 0; i < kReads; ++i) {
    reader_->Read({&handle, uint64_t{6007} * i, kSize, buffer.data() + i * 3 * kIoBlock, [&](absl::Status status) {
                     QUERN_EXPECT_OK(status);
                     MutexLock lock(&mutex);
                     ++ended;
                     changed.Signal();
                   }});
  }
  {
    MutexLock lock(&mutex);
    while (ended < kReads) changed.Wait(&mutex);
  }
  for (int i = 0; i < kReads; ++i) {
    const uint64_t offset = uint64_t{6007} * i;
    ASSERT_EQ(memcmp(buffer.data() + i * 3 * kIoBlock + offset % kIoBlock, content_.data() + offset, kSize), 0) << i;
  }
}

std::string ModeName(const testing::TestParamInfo<ReaderMode>& info) {
  switch (info.param) {
    case ReaderMode::kAuto:
      return "Auto";
    case ReaderMode::kDirect:
      return "Direct";
    case ReaderMode::kBuffered:
      return "Buffered";
    case ReaderMode::kMmap:
      return "Mmap";
  }
  return "";
}

INSTANTIATE_TEST_SUITE_P(Modes, SourceReaderTest,
                         testing::Values(ReaderMode::kAuto, ReaderMode::kDirect, ReaderMode::kBuffered, ReaderMode::kMmap), ModeName);

TEST(SourceReaderModeTest, NamesAreParsed) {
  EXPECT_THAT(ParseReaderMode("mmap"), IsOkAndHolds(ReaderMode::kMmap));
  EXPECT_THAT(ParseReaderMode("fast"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("auto, direct, buffered, mmap")));
}

TEST(SourceReaderModeTest, WithoutIoUringAutoIsBufferedAndDirectIsRefused) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<SourceReader> reader, NewSourceReader(ReaderMode::kAuto, nullptr));
  EXPECT_EQ(reader->name(), "buffered");
  EXPECT_THAT(NewSourceReader(ReaderMode::kDirect, nullptr), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("buffered")));
}

TEST(SourceReaderModeTest, AutoFallsBackWhereAFileHasNoDirectIo) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir dir, TempDir::Make("reader"));
  const std::string path = JoinPath(dir.path(), "file");
  QUERN_ASSERT_OK(WriteFileDurably(path, "hello"));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Uring> uring, Uring::Create(4));
  QUERN_ASSERT_OK_AND_ASSIGN(SourceHandle handle, OpenSource(path, /*direct=*/false, /*require_direct=*/false));
  AlignedBuffer buffer(kIoBlock);
  absl::Status result = absl::UnknownError("not called");
  QUERN_ASSERT_OK_AND_ASSIGN(std::unique_ptr<SourceReader> reader, NewSourceReader(ReaderMode::kAuto, uring.get()));
  EXPECT_EQ(reader->name(), "direct");
  reader->Read({&handle, 0, 5, buffer.data(), [&](absl::Status status) { result = status; }});
  EXPECT_EQ(reader->name(), "buffered");
  reader.reset();
  QUERN_EXPECT_OK(result);
  EXPECT_EQ(memcmp(buffer.data(), "hello", 5), 0);
}

TEST(SourceReaderModeTest, DirectoriesAreNoSources) {
  EXPECT_THAT(OpenSource("/tmp", false, false), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no regular file")));
}

}  // namespace
}  // namespace quern::worker
