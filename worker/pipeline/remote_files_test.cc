// Tasks whose files are not where the plan says: mapped, fetched, sent away, or copies.
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "checkpoint/fingerprint.h"
#include "worker/pipeline/test_shard_task.h"

namespace quern::worker {
namespace {

using testing::HasSubstr;

constexpr char kElsewhere[] = "/elsewhere";

// Runs what it is given, one after the other, on a thread of its own.
class Errands {
 public:
  ~Errands() {
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      changed_.SignalAll();
    }
    thread_.join();
  }
  void Run(std::function<void()> errand) {
    MutexLock lock(&mutex_);
    errands_.push_back(std::move(errand));
    changed_.SignalAll();
  }

 private:
  void Work() {
    while (true) {
      std::function<void()> errand;
      {
        MutexLock lock(&mutex_);
        while (errands_.empty() && !closing_) changed_.Wait(&mutex_);
        if (errands_.empty()) return;
        errand = std::move(errands_.front());
        errands_.pop_front();
      }
      errand();
    }
  }
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> errands_ QUERN_GUARDED_BY(mutex_);
  bool closing_ QUERN_GUARDED_BY(mutex_) = false;
  std::thread thread_{[this] { Work(); }};
};

// The coordinator's files are those of this machine, under another name.
class FakeFetcher : public RangeFetcher {
 public:
  absl::StatusOr<std::vector<uint64_t>> Check(const std::vector<std::string>& paths, bool) override {
    ++checks;
    if (!refuse.ok()) return refuse;
    std::vector<uint64_t> sizes;
    for (const std::string& path : paths) {
      absl::StatusOr<uint64_t> size = FileSize(Here(path));
      if (!size.ok()) return size.status();
      sizes.push_back(*size);
    }
    return sizes;
  }
  void Fetch(const std::string& path, uint64_t offset, std::byte* data, uint64_t size, std::function<void(absl::Status)> done) override {
    if (hangs) {
      MutexLock lock(&mutex_);
      if (!cancelled_) {
        hanging_.push_back(std::move(done));
        if (on_hang) on_hang();
        return;
      }
    }
    if (hangs) return done(absl::CancelledError("cancelled"));
    errands_.Run([=] {
      const absl::StatusOr<UniqueFd> fd = OpenFile(Here(path), O_RDONLY);
      done(fd.ok() ? ReadExactly(fd->get(), offset, data, size, path) : fd.status());
    });
  }
  void Cancel() override {
    std::vector<std::function<void(absl::Status)>> hanging;
    {
      MutexLock lock(&mutex_);
      cancelled_ = true;
      hanging.swap(hanging_);
    }
    for (auto& done : hanging) done(absl::CancelledError("cancelled"));
  }

  int checks = 0;
  absl::Status refuse;
  bool hangs = false;
  std::function<void()> on_hang;

 private:
  static std::string Here(const std::string& path) { return std::string(absl::StripPrefix(path, kElsewhere)); }
  Mutex mutex_;
  bool cancelled_ QUERN_GUARDED_BY(mutex_) = false;
  std::vector<std::function<void(absl::Status)>> hanging_ QUERN_GUARDED_BY(mutex_);
  Errands errands_;
};

// Writes a file in place of a coordinator, and says that bytes are durable only once a half window of them has come.
class FakeSink : public OutputSink {
 public:
  explicit FakeSink(std::string path) : path_(std::move(path)) {}

  absl::Status Begin(uint64_t size, uint64_t window) override {
    size_ = size;
    window_ = window;
    return WriteFileDurably(path_, "");
  }
  void Write(const std::byte* data, uint64_t size, std::function<void(absl::Status)> done) override {
    errands_.Run([=, this] {
      if (given_ >= fail_after) {
        done(absl::ResourceExhaustedError("write shard: disk full"));
        return;
      }
      const absl::StatusOr<UniqueFd> fd = OpenFile(path_, O_WRONLY);
      given_ += size;
      waiting_.push_back([=, this, at = given_ - size, open = fd.ok() ? dup(fd->get()) : -1] {
        UniqueFd file(open);
        done(WriteExactly(file.get(), at, data, size, path_));
      });
      if (given_ - durable_ < window_ / 2 && given_ < size_) return;
      durable_ = given_;
      for (auto& one : std::exchange(waiting_, {})) one();
    });
  }
  absl::Status Finish() override {
    finished = true;
    return absl::OkStatus();
  }
  void Cancel() override {
    errands_.Run([this] {
      for (auto& one : std::exchange(waiting_, {})) one();
      fail_after = 0;
    });
  }

  uint64_t fail_after = UINT64_MAX;
  bool finished = false;

 private:
  const std::string path_;
  uint64_t size_ = 0;
  uint64_t window_ = 0;
  // Of the errands.
  uint64_t given_ = 0;
  uint64_t durable_ = 0;
  std::vector<std::function<void()>> waiting_;
  Errands errands_;
};

class RemoteFilesTest : public RunTaskTest {
 protected:
  static void Move(ShardTask& task) {
    for (quern::v1::SourceFile& file : *task.spec().mutable_source_files()) file.set_path(kElsewhere + file.path());
  }
  TaskOptions Remote(FakeFetcher* fetcher, FakeSink* sink) {
    TaskOptions options = Options();
    options.fetcher = fetcher;
    options.fetch_source = true;
    options.output_path.clear();
    options.sink = sink;
    options.spool = spool_.path();
    return options;
  }
  const TempDir spool_ = TempDir::Make("spool").value();
};

TEST_F(RemoteFilesTest, FetchedSourceAndSentShardAreTheSameBytes) {
  ShardTask task(dir_.path());
  const uint64_t norm = task.AddWeight("norm", "BF16", 1, 100);
  const uint64_t weight = task.AddWeight("weight", "BF16", 300, 512);
  const uint64_t large = task.AddWeight("large", "BF16", 2055, 4096);
  for (int i = 0; i < 50; ++i) task.Copy(absl::StrCat("norm", i), norm + 2 * i, 99);
  task.Quantize("a", kGroup32, "BF16", weight, 300, 512);
  task.Quantize("spilled", kSmallGroups, "BF16", large, 2055, 4096);
  task.Copy("all", 0, task.source().size());
  task.Finish();
  Move(task);
  FakeFetcher fetcher;
  FakeSink sink(output_);
  const quern::v1::TaskResult result = ExpectRight(task, Remote(&fetcher, &sink));
  EXPECT_EQ(result.reader(), "fetched");
  EXPECT_TRUE(sink.finished);
  // Each file when it was opened, and both at the end.
  EXPECT_EQ(fetcher.checks, 3);
  EXPECT_THAT(ListDirectory(spool_.path()), IsOkAndHolds(testing::IsEmpty()));
}

// For this thread and those that it starts: as on a filesystem that cannot allocate ahead.
void RefuseFallocate() {
  sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program = {std::size(code), code};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

TEST_F(RemoteFilesTest, AFullSpoolIsThatOfTheWorkerAndNotTheDiskOfTheOutput) {
  const std::string small = JoinPath(spool_.path(), "small");
  QUERN_ASSERT_OK(MakeDirectories(small));
  if (mount("tmpfs", small.c_str(), "tmpfs", 0, "size=64k") != 0) {
    ASSERT_EQ(getenv("CI"), nullptr) << "mounting a tmpfs needs root";
    GTEST_SKIP() << "mounting a tmpfs needs root";
  }
  ShardTask task(dir_.path());
  const uint64_t large = task.AddWeight("large", "BF16", 2055, 4096);
  task.Quantize("spilled", kSmallGroups, "BF16", large, 2055, 4096);
  task.Finish();
  Move(task);
  const auto run = [&] {
    FakeFetcher fetcher;
    FakeSink sink(output_);
    TaskOptions options = Remote(&fetcher, &sink);
    options.spool = small;
    const quern::v1::Failure failure = FailureOf(Fails(task, options));
    EXPECT_EQ(failure.reason(), quern::v1::IO_ERROR) << failure.message();
    EXPECT_GT(failure.bytes_needed(), 64 << 10);
    EXPECT_THAT(failure.message(), testing::AllOf(HasSubstr("--spool, " + small + ","), HasSubstr("disk full"),
                                                  HasSubstr(absl::StrCat(failure.bytes_needed(), " bytes"))));
  };
  run();
  std::thread([&] {
    RefuseFallocate();
    run();
  }).join();
  EXPECT_EQ(umount(small.c_str()), 0);
}

TEST_F(RemoteFilesTest, MappedPathsAreReadHere) {
  ShardTask task(dir_.path());
  task.AddBytes(5000);
  task.Copy("all", 0, 5000);
  task.Finish();
  Move(task);
  TaskOptions options = Options();
  QUERN_ASSERT_OK(options.paths.Add("/elsewhere=/"));
  FakeFetcher fetcher;
  options.fetcher = &fetcher;
  EXPECT_NE(ExpectRight(task, options).reader(), "fetched");
  EXPECT_EQ(fetcher.checks, 0);
}

TEST_F(RemoteFilesTest, FilesThatAreNotHereAreFetched) {
  ShardTask task(dir_.path());
  task.AddBytes(5000);
  task.Copy("all", 0, 5000);
  task.Finish();
  Move(task);
  EXPECT_THAT(Fails(task, Options()), StatusIs(absl::StatusCode::kNotFound));
  FakeFetcher fetcher;
  TaskOptions options = Options();
  options.fetcher = &fetcher;
  EXPECT_EQ(ExpectRight(task, options).reader(), "fetched");
}

TEST_F(RemoteFilesTest, CopiesOfTheSourceAreKnownByTheirContent) {
  ShardTask task(dir_.path());
  task.AddBytes(5000);
  task.Copy("all", 0, 5000);
  task.Finish();
  quern::v1::SourceFile& file = *task.spec().mutable_source_files(0);
  std::string samples;
  for (const uint64_t offset : checkpoint::SampleOffsets(task.source().size())) samples += task.source().substr(offset, 4096);
  file.set_sample_digest(Xxh3_128Of(samples));
  file.set_inode(file.inode() + 1);
  ExpectRight(task, Options());
  QUERN_ASSERT_OK(RemoveFile(output_));
  file.set_mtime_ns(file.mtime_ns() + 1);
  ExpectRight(task, Options());
  QUERN_ASSERT_OK(RemoveFile(output_));
  file.set_sample_digest(Xxh3_128Of(samples + "."));
  const absl::Status status = Fails(task, Options());
  EXPECT_EQ(FailureOf(status).reason(), quern::v1::SOURCE_CHANGED);
  EXPECT_THAT(std::string(status.message()), HasSubstr("its content is another one"));
}

TEST_F(RemoteFilesTest, CopiesAreReadAsAWholeWhereThePlanHasTheDigestOfAll) {
  ShardTask task(dir_.path());
  task.AddBytes(1 * kMiB);
  task.Copy("all", 0, 5000);
  task.Finish();
  quern::v1::SourceFile& file = *task.spec().mutable_source_files(0);
  std::string samples;
  const std::vector<uint64_t> offsets = checkpoint::SampleOffsets(task.source().size());
  for (const uint64_t offset : offsets) samples += task.source().substr(offset, 4096);
  file.set_sample_digest(Xxh3_128Of(samples));
  // A byte that no sample covers.
  ASSERT_GT(offsets[1], offsets[0] + 4096);
  const std::string original = task.source();
  std::string other = original;
  other[offsets[1] - 1] ^= 1;

  // Under --map, with the time of the original, as rsync leaves it.
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir elsewhere, TempDir::Make("copies"));
  const std::string& copies = elsewhere.path();
  TaskOptions options = Options();
  QUERN_ASSERT_OK(options.paths.Add(absl::StrCat(file.path(), "=", copies, "/here")));
  const auto place = [&](const std::string& content) {
    QUERN_ASSERT_OK(WriteFileDurably(JoinPath(copies, "here"), content));
    struct stat info;
    ASSERT_EQ(stat(JoinPath(copies, "here").c_str(), &info), 0);
    file.set_mtime_ns(int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec);
    file.set_inode(info.st_ino);
  };
  place(other);
  const absl::StatusOr<quern::v1::TaskResult> sampled = [&] {
    TaskControl control;
    return RunTask(task.spec(), options, &control);
  }();
  QUERN_EXPECT_OK(sampled.status()) << "samples do not show it";
  QUERN_ASSERT_OK(RemoveFile(output_));
  file.set_content_sha256(Sha256Of(original));
  const absl::Status status = Fails(task, options);
  EXPECT_EQ(FailureOf(status).reason(), quern::v1::SOURCE_CHANGED);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr(file.path()), HasSubstr(copies + "/here"), HasSubstr("its content is another one")));
  place(original);
  ExpectRight(task, options);
  QUERN_ASSERT_OK(RemoveFile(output_));
  // Also one under its own path, with another time.
  options = Options();
  file.set_mtime_ns(file.mtime_ns() + 1);
  ExpectRight(task, options);
  QUERN_ASSERT_OK(RemoveFile(output_));
  file.set_content_sha256(Sha256Of(other));
  EXPECT_EQ(FailureOf(Fails(task, options)).reason(), quern::v1::SOURCE_CHANGED);
}

TEST_F(RemoteFilesTest, RefusalOfTheCoordinatorIsTheFailure) {
  ShardTask task(dir_.path());
  task.AddBytes(5000);
  task.Copy("all", 0, 5000);
  task.Finish();
  FakeFetcher fetcher;
  fetcher.refuse = WithFailure(absl::FailedPreconditionError("it was replaced"), quern::v1::SOURCE_CHANGED);
  FakeSink sink(output_);
  EXPECT_EQ(FailureOf(Fails(task, Remote(&fetcher, &sink))).reason(), quern::v1::SOURCE_CHANGED);
  fetcher.refuse = absl::OkStatus();
  sink.fail_after = 0;
  EXPECT_EQ(FailureOf(Fails(task, Remote(&fetcher, &sink))).reason(), quern::v1::DISK_FULL);
  EXPECT_FALSE(sink.finished);
}

TEST_F(RemoteFilesTest, StopEndsATaskThatWaitsForItsSource) {
  ShardTask task(dir_.path());
  task.AddBytes(5000);
  task.Copy("all", 0, 5000);
  task.Finish();
  FakeFetcher fetcher;
  fetcher.hangs = true;
  FakeSink sink(output_);
  TaskControl control;
  fetcher.on_hang = [&control] { control.stop = true; };
  EXPECT_THAT(RunTask(task.spec(), Remote(&fetcher, &sink), &control), StatusIs(absl::StatusCode::kCancelled));
}

}  // namespace
}  // namespace quern::worker
