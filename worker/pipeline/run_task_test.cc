#include "worker/pipeline/run_task.h"

#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "base/task_memory.h"
#include "quant/scheme.h"
#include "worker/pipeline/test_shard_task.h"

namespace quern::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr char kGroup128[] = "int4 group=128 symmetric observer=minmax numerics=reference";
constexpr char kChannelThreeBits[] = "int3 channel asymmetric observer=minmax numerics=reference";

TEST_F(RunTaskTest, EveryKindOfUnitInOneShard) {
  ShardTask task(dir_.path());
  const uint64_t norm = task.AddWeight("norm", "BF16", 1, 100);
  const uint64_t weight = task.AddWeight("weight", "BF16", 96, 128);
  const uint64_t odd = task.AddWeight("odd", "F32", 3, 256);
  const uint64_t bias = task.AddWeight("bias", "F16", 40, 96);
  task.Copy("norm", norm, 200);
  task.Quantize("a", kGroup32, "BF16", weight, 96, 128);
  task.Copy("empty", 5000, 0);
  task.Quantize("b", kThreeBits, "F32", odd, 3, 256);
  task.Generate("made", "BF16", 33, 77);
  task.Quantize("c", kChannel, "F16", bias, 40, 96);
  task.Copy("one byte", 1, 1);
  task.Finish();
  for (const ReaderMode mode : kModes) {
    ExpectRight(task, Options(kMinimumTaskMemory, 2, mode));
    QUERN_ASSERT_OK(RemoveFile(output_));
  }
}

TEST_F(RunTaskTest, ResultSaysHowItRan) {
  ShardTask task(dir_.path());
  task.Copy("all", 0, 1000);
  task.Finish();
  for (const auto& [mode, name] :
       {std::pair(ReaderMode::kDirect, "direct"), std::pair(ReaderMode::kBuffered, "buffered"), std::pair(ReaderMode::kMmap, "mmap")}) {
    TaskControl control;
    QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::TaskResult result, RunTask(task.spec(), Options(kMinimumTaskMemory, 1, mode), &control));
    EXPECT_EQ(result.reader(), name);
    EXPECT_EQ(result.kernel_target(), quant::KernelTarget());
    EXPECT_GT(result.peak_rss(), kMiB);
    EXPECT_GT(result.times().wall_seconds(), 0);
    EXPECT_EQ(result.tensors_written(), 1);
    EXPECT_EQ(result.bytes_read(), 1000);
    QUERN_ASSERT_OK(RemoveFile(output_));
  }
}

// The shapes are chosen so that each way of keeping side tensors is taken with the least pool, in bands and in segments.
TEST_F(RunTaskTest, BytesDoNotDependOnThreadsPoolOrReader) {
  ShardTask task(dir_.path());
  struct Module {
    const char* scheme;
    const char* dtype;
    int64_t rows, cols;
  };
  const Module modules[] = {
      {kGroup32, "BF16", 300, 512},            // whole in the window
      {kGroup128, "BF16", 1030, 8192},         // held, bands
      {kSmallGroups, "BF16", 2055, 4096},      // spilled, bands
      {kSmallGroups, "BF16", 70, 131072},      // spilled, segments
      {kChannelThreeBits, "F32", 37, 40960},   // window, segments, two passes
      {kChannel, "BF16", 70, 65536},           // held, segments, two passes
      {kThreeBits, "F16", 64, 131072},         // held, segments, values of zero points split between words
      {kGroup32, "BF16", 2, 9 * 1024 * 1024},  // one row is larger than the pool
  };
  std::vector<uint64_t> offsets;
  int next = 0;
  for (const Module& module : modules) {
    offsets.push_back(task.AddWeight(absl::StrCat("weight", next++), module.dtype, module.rows, module.cols));
    task.AddBytes(2 * (next % 3));
  }
  next = 0;
  for (const Module& module : modules) {
    task.Copy(absl::StrCat("copy", next), 777 * next, 1 + 900'000 * next);
    task.Quantize(absl::StrCat("module", next), module.scheme, module.dtype, offsets[next], module.rows, module.cols);
    ++next;
  }
  task.Generate("made", "F16", 3000, 1111);
  task.Finish();
  ASSERT_TRUE(task.valid());

  const char* const given = std::getenv("QUERN_TEST_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::atoi(given)) : 20;
  std::mt19937 random(seed);
  for (const ReaderMode mode : kModes) {
    const uint64_t memory = mode == ReaderMode::kDirect ? kMinimumTaskMemory : kMinimumTaskMemory + random() % (100 * kMiB);
    const int threads = 1 + static_cast<int>(random() % 4);
    SCOPED_TRACE(absl::StrCat("seed ", seed, " mode ", static_cast<int>(mode), " memory ", memory, " threads ", threads));
    ExpectRightAndEqual(task, Options(memory, threads, mode));
  }
}

TEST_F(RunTaskTest, ManySmallTensors) {
  ShardTask task(dir_.path());
  const uint64_t offset = task.AddWeight("all", "BF16", 4000, 96);
  for (int i = 0; i < 2000; ++i) {
    task.Copy(absl::StrCat("norm", i), offset + 191 * i, 100 + i % 91);
    if (i % 4 == 0) task.Quantize(absl::StrCat("module", i), kGroup32, "BF16", offset + 192 * i, 1 + i % 40, 96);
  }
  task.Finish();
  ExpectRight(task, Options());
}

TEST_F(RunTaskTest, SlicesAndInterleavedRowsAreViews) {
  ShardTask task(dir_.path());
  const uint64_t stack = task.AddWeight("stack", "BF16", 200, 64);
  task.Quantize("slice", kGroup32, "BF16", stack + 50 * 128, 70, 64);
  task.Quantize("even", kGroup32, "BF16", stack, 100, 64, 2 * 128);
  task.Quantize("every fifth", kGroup32, "BF16", stack + 128, 39, 64, 5 * 128);
  task.Quantize("columns", kGroup32, "BF16", stack + 64, 200, 32, 128);
  task.Finish();
  ExpectRight(task, Options());
  TaskControl control;
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::TaskResult compared, RunTask(task.CompareSpec(output_), ReadOptions(), &control));
  EXPECT_THAT(compared.mismatches(), IsEmpty());
}

TEST_F(RunTaskTest, WeightsAtOddOffsets) {
  ShardTask task(dir_.path());
  task.AddBytes(1);
  const uint64_t weight = task.AddWeight("weight", "BF16", 70, 64);
  task.AddBytes(1);
  const uint64_t other = task.AddWeight("other", "F32", 33, 64);
  task.Quantize("a", kGroup32, "BF16", weight, 70, 64);
  task.Copy("shift", 0, 3);
  task.Quantize("b", kGroup32, "F32", other, 33, 64);
  task.Finish();
  ExpectRight(task, Options());
}

TEST_F(RunTaskTest, NonfiniteValuesFailNamingThePlace) {
  ShardTask task(dir_.path());
  const uint64_t weight = task.AddWeight("weight", "BF16", 96, 64);
  const uint16_t nan = 0x7FC0;
  memcpy(task.source().data() + weight + 2 * (70 * 64 + 33), &nan, 2);
  task.Quantize("a", kGroup32, "BF16", weight, 96, 64);
  task.Finish();
  const absl::Status status = Fails(task, Options());
  EXPECT_EQ(FailureOf(status).reason(), quern::v1::BAD_INPUT);
  EXPECT_THAT(FailureOf(status).message(), AllOf(HasSubstr("a.weight"), HasSubstr("/source"), HasSubstr("row 70"), HasSubstr("column 33")));
  EXPECT_FALSE(FileExists(output_));
}

TEST_F(RunTaskTest, NonfiniteValuesCanBeClamped) {
  ShardTask task(dir_.path());
  const uint64_t weight = task.AddWeight("weight", "BF16", 96, 64);
  const uint16_t inf = 0x7F80;
  memcpy(task.source().data() + weight + 2 * (70 * 64 + 33), &inf, 2);
  task.Quantize("a", kGroup128, "BF16", weight, 48, 128, 0, "clamp");
  task.Finish();
  ASSERT_EQ(task.errors()[0].nonfinite(), 1);
  ExpectRight(task, Options());
  TaskControl control;
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::TaskResult compared, RunTask(task.CompareSpec(output_), ReadOptions(), &control));
  EXPECT_THAT(compared.mismatches(), IsEmpty());
}

TEST_F(RunTaskTest, AChangedSourceIsRefused) {
  ShardTask task(dir_.path());
  task.Copy("all", 0, 1000);
  task.Finish();
  const auto expect_changed = [&](const char* what) {
    const absl::Status status = Fails(task, Options());
    EXPECT_EQ(FailureOf(status).reason(), quern::v1::SOURCE_CHANGED) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("/source"), HasSubstr(what)));
    EXPECT_FALSE(FileExists(output_));
  };
  quern::v1::SourceFile& file = *task.spec().mutable_source_files(0);
  const quern::v1::SourceFile original = file;
  file.set_size(file.size() + 1);
  expect_changed("size");
  file = original;
  file.set_mtime_ns(file.mtime_ns() - 1);
  expect_changed("modified");
  file = original;
  file.set_inode(file.inode() + 1);
  expect_changed("replaced");
  file = original;
  file.set_header_sha256(std::string(32, 'z'));
  expect_changed("header");
}

TEST_F(RunTaskTest, ASourceThatIsTruncatedWhileItIsReadFailsTheTaskAlone) {
  constexpr uint64_t kSize = 400 * kMiB;
  for (const ReaderMode mode : kModes) {
    // Holes: no disk is needed.
    const std::string path = JoinPath(dir_.path(), absl::StrCat("sparse", static_cast<int>(mode)));
    QUERN_ASSERT_OK(WriteFileDurably(path, "x"));
    ASSERT_EQ(truncate(path.c_str(), kSize), 0);
    quern::v1::TaskSpec spec;
    spec.add_source_files()->set_path(path);
    spec.mutable_source_files(0)->set_size(kSize);
    spec.mutable_compare_shard()->set_path(path);
    quern::v1::CopyUnit* copy = spec.mutable_compare_shard()->add_units()->mutable_copy();
    copy->mutable_source()->set_tensor("holes");
    copy->mutable_source()->set_rows(1);
    copy->mutable_source()->set_cols(kSize);
    copy->mutable_output()->set_name("holes");
    copy->mutable_output()->set_size(kSize);
    TaskControl control;
    std::thread truncater([&] {
      while (control.bytes_read < 4 * kMiB) std::this_thread::yield();
      ASSERT_EQ(truncate(path.c_str(), 4 * kMiB), 0);
    });
    const absl::Status status = RunTask(spec, ReadOptions(mode), &control).status();
    truncater.join();
    EXPECT_EQ(FailureOf(status).reason(), quern::v1::SOURCE_CHANGED) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    QUERN_ASSERT_OK(RemoveFile(path));
  }
}

TEST_F(RunTaskTest, StopEndsTheTaskAndRemovesTheFile) {
  ShardTask task(dir_.path());
  const uint64_t weight = task.AddWeight("weight", "BF16", 8192, 4096);
  for (int i = 0; i < 4; ++i) task.Copy(absl::StrCat("c", i), weight, uint64_t{8192} * 4096 * 2);
  task.Finish();
  TaskControl control;
  std::thread stopper([&] {
    while (control.bytes_read < kMiB) std::this_thread::yield();
    control.stop = true;
  });
  EXPECT_THAT(RunTask(task.spec(), Options(), &control), StatusIs(absl::StatusCode::kCancelled));
  stopper.join();
  EXPECT_FALSE(FileExists(output_));
  control.stop = true;
  EXPECT_THAT(RunTask(task.spec(), Options(), &control), StatusIs(absl::StatusCode::kCancelled));
  EXPECT_FALSE(FileExists(output_));
}

TEST_F(RunTaskTest, AnExistingOutputIsLeftAlone) {
  ShardTask task(dir_.path());
  task.Copy("all", 0, 1000);
  task.Finish();
  QUERN_ASSERT_OK(WriteFileDurably(output_, "mine"));
  EXPECT_EQ(FailureOf(Fails(task, Options())).reason(), quern::v1::OUTPUT_EXISTS);
  EXPECT_THAT(ReadFileToString(output_), IsOkAndHolds(std::string("mine")));
}

TEST_F(RunTaskTest, NothingIsWrittenBehindALinkBelowTheRoot) {
  const TempDir farm = TempDir::Make("farm").value();
  const std::string victim = JoinPath(farm.path(), "victim"), attempts = JoinPath(farm.path(), "out/.quern/attempts");
  QUERN_ASSERT_OK(MakeDirectories(victim));
  QUERN_ASSERT_OK(MakeDirectories(DirName(attempts)));
  ASSERT_EQ(symlink(victim.c_str(), attempts.c_str()), 0);
  ShardTask task(dir_.path());
  task.Copy("all", 0, 1000);
  task.Finish();
  TaskOptions options = Options();
  options.output_path = JoinPath(attempts, "0.1");
  const absl::Status refused = Fails(task, options);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("symbolic link")));
  EXPECT_EQ(FailureOf(refused).reason(), quern::v1::IO_ERROR);
  EXPECT_THAT(ListDirectory(victim), IsOkAndHolds(IsEmpty()));
  // What lies above the root is the administrator's.
  options.output_root = attempts;
  QUERN_EXPECT_OK(Fails(task, options));
  EXPECT_THAT(ListDirectory(victim), IsOkAndHolds(SizeIs(1)));
}

TEST_F(RunTaskTest, TooLittleMemoryIsRefused) {
  ShardTask task(dir_.path());
  task.Copy("all", 0, 1000);
  task.Finish();
  const quern::v1::Failure failure = FailureOf(Fails(task, Options(kMinimumTaskMemory - 1)));
  EXPECT_EQ(failure.reason(), quern::v1::MEMORY_TOO_SMALL);
  EXPECT_EQ(failure.bytes_needed(), kMinimumTaskMemory);
  task.spec().set_minimum_memory(64 * kMiB);
  EXPECT_EQ(FailureOf(Fails(task, Options())).bytes_needed(), 64 * kMiB);
}

TEST_F(RunTaskTest, AFullDiskSaysHowMuchIsNeeded) {
  struct statvfs info;
  if (statvfs("/dev/shm", &info) != 0) GTEST_SKIP() << "no /dev/shm here";
  // A tmpfs refuses at once what is larger than itself.
  const uint64_t size = RoundUp(uint64_t{info.f_blocks} * info.f_frsize + kGiB, 4);
  quern::v1::TaskSpec spec;
  quern::v1::WriteShard* work = spec.mutable_write_shard();
  work->set_header(std::string(4096, 'h'));
  quern::v1::GenerateUnit* unit = work->add_units()->mutable_generate();
  unit->set_distribution("zeros");
  unit->mutable_output()->set_name("zeros");
  unit->mutable_output()->set_dtype("F32");
  unit->mutable_output()->add_shape(size / 4);
  unit->mutable_output()->set_offset(4096);
  unit->mutable_output()->set_size(size);
  work->set_file_size(4096 + size);
  TaskOptions options = Options();
  options.output_path = "/dev/shm/quern-run-task-test";
  TaskControl control;
  const quern::v1::Failure failure = FailureOf(RunTask(spec, options, &control).status());
  EXPECT_EQ(failure.reason(), quern::v1::DISK_FULL);
  EXPECT_EQ(failure.bytes_needed(), 4096 + size);
  EXPECT_THAT(failure.message(), HasSubstr("disk full"));
  EXPECT_FALSE(FileExists(options.output_path));
}

TEST_F(RunTaskTest, PlansThatDoNotFitTheirFilesAreRefused) {
  const auto expect_refused = [&](const char* what, const std::function<void(quern::v1::TaskSpec&)>& change) {
    ShardTask task(dir_.path());
    const uint64_t weight = task.AddWeight("weight", "BF16", 32, 64);
    task.Copy("copy", 0, 1000);
    task.Quantize("a", kGroup32, "BF16", weight, 32, 64);
    task.Finish();
    change(task.spec());
    const absl::Status status = Fails(task, Options());
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what)));
    EXPECT_FALSE(FileExists(output_));
  };
  using Spec = quern::v1::TaskSpec;
  const auto copy = [](Spec& spec) { return spec.mutable_write_shard()->mutable_units(0)->mutable_copy(); };
  const auto quantize = [](Spec& spec) { return spec.mutable_write_shard()->mutable_units(1)->mutable_quantize(); };
  expect_refused("lead out of", [&](Spec& spec) { copy(spec)->mutable_source()->set_offset(UINT64_MAX - 10); });
  expect_refused("no source file", [&](Spec& spec) { copy(spec)->mutable_source()->set_file(2); });
  expect_refused("ends at", [&](Spec& spec) { copy(spec)->mutable_output()->set_offset(4097); });
  expect_refused("ends at", [&](Spec& spec) { copy(spec)->mutable_output()->set_size(UINT64_MAX); });
  expect_refused("tensors end at", [&](Spec& spec) { spec.mutable_write_shard()->set_file_size(1); });
  expect_refused("leads out of", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_row_stride(1 << 20); });
  expect_refused("elements in a file", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_rows(UINT64_MAX); });
  expect_refused("overlaps", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_row_stride(-128); });
  expect_refused("overlaps itself", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_col_stride(64); });
  expect_refused("the scheme stores", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_rows(31); });
  expect_refused("multiple of the group size", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_cols(63); });
  expect_refused("no scheme", [&](Spec& spec) { quantize(spec)->mutable_weight()->add_decode()->set_role("weight_scale_inv"); });
}

class VerifyFileTest : public RunTaskTest {
 protected:
  void SetUp() override {
    std::mt19937 random(8);
    content_.resize(9 * kMiB + 5);
    for (char& byte : content_) byte = static_cast<char>(random());
    // A scale that crosses tiles of 2 MiB, at an odd offset.
    for (size_t i = kScaleAt; i < kScaleAt + kScaleSize; ++i) content_[i] = 0x3C;
    for (size_t i = kPackedAt; i < kPackedAt + kPackedRows * 12; i += 12) {
      content_[i + 9] = static_cast<char>(content_[i + 9] & 0x3F);
      content_[i + 10] = content_[i + 11] = 0;
    }
    // Zero points of 5 rows of 4 bits: 20 bits of each word.
    for (size_t i = kZeroAt; i < kZeroAt + 400; i += 4) {
      content_[i + 2] = static_cast<char>(content_[i + 2] & 0x0F);
      content_[i + 3] = 0;
    }
  }

  quern::v1::TaskSpec Spec() {
    quern::v1::TaskSpec spec;
    quern::v1::VerifyFile* work = spec.mutable_verify_file();
    work->set_path(JoinPath(dir_.path(), "file"));
    work->set_size(content_.size());
    work->set_sha256(Sha256Of(content_));
    const auto add = [&](const char* name, const char* dtype, std::vector<uint64_t> shape, uint64_t offset, uint64_t size) {
      quern::v1::ValueCheck* check = work->add_checks();
      check->mutable_tensor()->set_name(name);
      check->mutable_tensor()->set_dtype(dtype);
      for (const uint64_t dimension : shape) check->mutable_tensor()->add_shape(dimension);
      check->mutable_tensor()->set_offset(offset);
      check->mutable_tensor()->set_size(size);
      return check;
    };
    add("scale", "BF16", {kScaleSize / 2}, kScaleAt, kScaleSize)->set_kind(quern::v1::ValueCheck::FINITE_NONZERO);
    quern::v1::ValueCheck* packed = add("packed", "I32", {kPackedRows, 3}, kPackedAt, kPackedRows * 12);
    packed->set_kind(quern::v1::ValueCheck::ZERO_TAIL_BITS);
    packed->set_num_bits(3);
    packed->set_elements(26);  // 78 bits
    packed->set_packed_dim(1);
    quern::v1::ValueCheck* zero = add("zero_point", "I32", {1, 100}, kZeroAt, 400);
    zero->set_kind(quern::v1::ValueCheck::ZERO_TAIL_BITS);
    zero->set_num_bits(4);
    zero->set_elements(5);
    quern::v1::ValueCheck* shape = add("shape", "I64", {2}, 100, 16);
    shape->set_kind(quern::v1::ValueCheck::EQUALS);
    shape->set_expected(content_.substr(100, 16));
    return spec;
  }

  // The mismatches found in the file as it is now.
  std::vector<quern::v1::Mismatch> Verify(const quern::v1::TaskSpec& spec, ReaderMode mode = ReaderMode::kAuto) {
    EXPECT_THAT(WriteFileDurably(spec.verify_file().path(), content_), IsOk());
    TaskControl control;
    const absl::StatusOr<quern::v1::TaskResult> result = RunTask(spec, ReadOptions(mode), &control);
    EXPECT_THAT(result, IsOk());
    if (!result.ok()) return {};
    return {result->mismatches().begin(), result->mismatches().end()};
  }

  static constexpr uint64_t kScaleAt = 2 * kMiB - 3001;
  static constexpr uint64_t kScaleSize = 5 * kMiB;
  static constexpr uint64_t kPackedAt = 8 * kMiB - 600;
  static constexpr uint64_t kPackedRows = 100;
  static constexpr uint64_t kZeroAt = 9 * kMiB - 1000;
  std::string content_;
};

TEST_F(VerifyFileTest, ASoundFilePasses) {
  const quern::v1::TaskSpec spec = Spec();
  for (const ReaderMode mode : kModes) EXPECT_THAT(Verify(spec, mode), IsEmpty());
}

TEST_F(VerifyFileTest, WrongBytesAreFoundWhereTheyStand) {
  const quern::v1::TaskSpec spec = Spec();
  const std::string sound = content_;
  struct Case {
    const char* tensor;
    uint64_t at;
    std::string bytes;
    uint64_t reported;
  };
  const Case cases[] = {
      {"scale", kScaleAt + 4, std::string("\x00\x00", 2), kScaleAt + 4},
      {"scale", kScaleAt + kScaleSize - 2, std::string("\x80\x7F", 2), kScaleAt + kScaleSize - 2},
      {"scale", 4 * kMiB - 1, std::string("\xC0\xFF", 2), 4 * kMiB - 1},  // cut by the end of a tile
      {"packed", kPackedAt + 12 * 99 + 9, "\x7F", kPackedAt + 12 * 99 + 9},
      {"packed", kPackedAt + 12 * 3 + 11, "\x01", kPackedAt + 12 * 3 + 11},
      {"zero_point", kZeroAt + 4 * 77 + 2, "\x10", kZeroAt + 4 * 77 + 2},
      {"shape", 115, std::string(1, static_cast<char>(sound[115] + 1)), 100},
  };
  for (const Case& wrong : cases) {
    SCOPED_TRACE(absl::StrCat(wrong.tensor, " at ", wrong.at));
    content_ = sound;
    content_.replace(wrong.at, wrong.bytes.size(), wrong.bytes);
    const std::vector<quern::v1::Mismatch> found = Verify(spec);
    ASSERT_THAT(found, SizeIs(2));
    EXPECT_THAT(found[0].what(), HasSubstr("SHA-256"));
    EXPECT_EQ(found[1].tensor(), wrong.tensor);
    EXPECT_EQ(found[1].offset(), wrong.reported);
    EXPECT_EQ(found[1].file(), spec.verify_file().path());
  }
}

TEST_F(VerifyFileTest, ScalesAndValuesOfEveryDType) {
  const auto expect = [&](const char* dtype, quern::v1::ValueCheck::Kind kind, const std::string& bytes, bool sound) {
    content_.assign(5 * kMiB, '\x38');
    const uint64_t at = 4 * kMiB - bytes.size() + 1;  // where tiles meet
    content_.replace(at, bytes.size(), bytes);
    quern::v1::TaskSpec spec;
    quern::v1::VerifyFile* work = spec.mutable_verify_file();
    work->set_path(JoinPath(dir_.path(), "file"));
    work->set_size(content_.size());
    work->set_sha256(Sha256Of(content_));
    quern::v1::ValueCheck* check = work->add_checks();
    check->set_kind(kind);
    check->mutable_tensor()->set_name("values");
    check->mutable_tensor()->set_dtype(dtype);
    check->mutable_tensor()->set_offset(at - 3 * bytes.size());
    check->mutable_tensor()->set_size(10'000 * bytes.size());
    const std::vector<quern::v1::Mismatch> found = Verify(spec);
    ASSERT_EQ(found.empty(), sound) << dtype << " " << HexDigest(bytes);
    if (!sound) {
      EXPECT_EQ(found[0].offset(), at);
    }
  };
  using Check = quern::v1::ValueCheck;
  using namespace std::string_literals;
  for (const Check::Kind kind : {Check::FINITE_NONZERO, Check::FINITE}) {
    const bool scales = kind == Check::FINITE_NONZERO;
    expect("F8_E4M3", kind, "\x7E"s, true);
    expect("F8_E4M3", kind, "\x01"s, true);
    expect("F8_E4M3", kind, "\x7F"s, false);
    expect("F8_E4M3", kind, "\xFF"s, false);
    expect("F8_E4M3", kind, "\x00"s, !scales);
    expect("F8_E4M3", kind, "\x80"s, !scales);
    expect("F8_E4M3", kind, "\xB8"s, !scales);
    expect("BF16", kind, "\x7F\x7F"s, true);
    expect("BF16", kind, "\x80\x7F"s, false);
    expect("BF16", kind, "\xC0\xFF"s, false);
    expect("BF16", kind, "\x00\x80"s, !scales);
    expect("F16", kind, "\xFF\x7B"s, true);
    expect("F16", kind, "\x00\x7C"s, false);
    expect("F32", kind, "\xFF\xFF\x7F\x7F"s, true);
    expect("F32", kind, "\x00\x00\x80\x7F"s, false);
    expect("F32", kind, "\x00\x00\x80\xFF"s, false);
    expect("F32", kind, "\x00\x00\x00\x00"s, !scales);
  }
  expect("U8", Check::FINITE_NONZERO, "\x00"s, true);
  expect("U8", Check::FINITE_NONZERO, "\xFE"s, true);
  expect("U8", Check::FINITE_NONZERO, "\xFF"s, false);
  expect("F8_E8M0", Check::FINITE_NONZERO, "\xFF"s, false);
}

TEST_F(VerifyFileTest, MissingAndShortFilesAreMismatches) {
  const quern::v1::TaskSpec spec = Spec();
  TaskControl control;
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::TaskResult missing, RunTask(spec, ReadOptions(), &control));
  ASSERT_EQ(missing.mismatches_size(), 1);
  EXPECT_THAT(missing.mismatches(0).what(), HasSubstr("missing"));
  content_.pop_back();
  const std::vector<quern::v1::Mismatch> found = Verify(spec);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_THAT(found[0].what(), HasSubstr("instead of"));
}

TEST_F(RunTaskTest, CompareFindsChangedCopiesAndModules) {
  ShardTask task(dir_.path());
  const uint64_t weight = task.AddWeight("weight", "BF16", 96, 128);
  task.Copy("copy", weight, 20000);
  task.Quantize("a", kGroup32, "BF16", weight, 96, 128);
  task.Quantize("b", kGroup32, "BF16", weight, 64, 128);
  task.Finish();
  TaskControl control;
  QUERN_ASSERT_OK(RunTask(task.spec(), Options(), &control));
  const quern::v1::TaskSpec spec = task.CompareSpec(output_);
  const auto mismatches = [&](uint64_t offset) {
    std::string changed = task.expected();
    changed[offset] = static_cast<char>(changed[offset] ^ 1);
    EXPECT_THAT(WriteFileDurably(output_, changed), IsOk());
    TaskControl read_control;
    const absl::StatusOr<quern::v1::TaskResult> result = RunTask(spec, ReadOptions(), &read_control);
    EXPECT_THAT(result, IsOk());
    return result.value_or(quern::v1::TaskResult());
  };
  quern::v1::TaskResult result = mismatches(4096 + 12345);
  ASSERT_EQ(result.mismatches_size(), 1);
  EXPECT_EQ(result.mismatches(0).tensor(), "copy");
  EXPECT_EQ(result.mismatches(0).offset(), 4096 + 12345);

  const quern::v1::QuantizeUnit& module = task.spec().write_shard().units(2).quantize();
  for (int region = 0; region < module.outputs_size(); ++region) {
    result = mismatches(module.outputs(region).offset() + 2);
    ASSERT_EQ(result.mismatches_size(), 1) << region;
    EXPECT_EQ(result.mismatches(0).tensor(), "b");
  }
}

}  // namespace
}  // namespace quern::worker
