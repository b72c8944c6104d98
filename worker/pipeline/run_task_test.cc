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
#include "worker/pipeline/generate.h"

namespace quern::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr ReaderMode kModes[] = {ReaderMode::kAuto, ReaderMode::kDirect, ReaderMode::kBuffered, ReaderMode::kMmap};

// A source file, the task that turns it into a shard, and what that shard must be, made tensor by tensor with one tile each.
class ShardTask {
 public:
  explicit ShardTask(const std::string& directory) : directory_(directory) {
    // Data begins anywhere: tensors of real files are not aligned to blocks.
    source_.assign(1234, 's');
    header_.assign(4096, 'h');
    expected_ = header_;
    spec_.mutable_write_shard()->set_header(header_);
  }

  // A weight of "realistic" values. Returns its offset in the source.
  uint64_t AddWeight(const std::string& name, const std::string& dtype, int64_t rows, int64_t cols) {
    quern::v1::GenerateUnit unit;
    unit.set_distribution("normal");
    unit.set_seed(source_.size());
    unit.set_standard_deviation(0.05);
    unit.mutable_output()->set_name(name);
    unit.mutable_output()->set_dtype(dtype);
    unit.mutable_output()->add_shape(rows);
    unit.mutable_output()->add_shape(cols);
    const Generator probe = Generator::For([&] {
                              unit.mutable_output()->set_size(rows * cols * (dtype == "F32" ? 4 : 2));
                              return unit;
                            }())
                                .value();
    const uint64_t offset = source_.size();
    source_.resize(offset + unit.output().size());
    probe.Fill(0, rows * cols, reinterpret_cast<std::byte*>(source_.data() + offset));
    return offset;
  }

  void AddBytes(uint64_t size) { source_.append(size, 'x'); }
  std::string& source() { return source_; }

  void Copy(const std::string& name, uint64_t offset, uint64_t size) {
    quern::v1::CopyUnit* unit = spec_.mutable_write_shard()->add_units()->mutable_copy();
    *unit->mutable_source() = View(name, "U8", offset, 1, size, size, 1);
    AddOutput(unit->mutable_output(), name, "U8", {size}, size);
    expected_.append(source_, offset, size);
    AddDigest(name, {Xxh3Of(source_.data() + offset, size)});
  }

  void Generate(const std::string& name, const std::string& dtype, uint64_t rows, uint64_t cols) {
    quern::v1::GenerateUnit* unit = spec_.mutable_write_shard()->add_units()->mutable_generate();
    unit->set_distribution("normal");
    unit->set_seed(9);
    unit->set_standard_deviation(1);
    AddOutput(unit->mutable_output(), name, dtype, {rows, cols}, rows * cols * (dtype == "F32" ? 4 : 2));
    const uint64_t at = expected_.size();
    expected_.resize(at + unit->output().size());
    Generator::For(*unit).value().Fill(0, rows * cols, reinterpret_cast<std::byte*>(expected_.data() + at));
  }

  // Quantizes rows `row_stride` bytes apart (0: dense).
  void Quantize(const std::string& module, const std::string& scheme_text, const std::string& dtype, uint64_t offset, int64_t rows,
                int64_t cols, int64_t row_stride = 0, const std::string& nonfinite = "fail") {
    const DType type = ParseDType(dtype).value();
    const int64_t element = BytesPerElement(type);
    if (row_stride == 0) row_stride = cols * element;
    const quant::Scheme& scheme = *quant::Scheme::For(quant::SchemeSpec::Parse(scheme_text).value()).value();
    quern::v1::QuantizeUnit* unit = spec_.mutable_write_shard()->add_units()->mutable_quantize();
    unit->set_module(module);
    *unit->mutable_weight() = View(module + ".weight", dtype, offset, rows, cols, row_stride, element);
    unit->set_scheme(scheme_text);
    unit->set_export_format("compressed-tensors");
    unit->set_nonfinite(nonfinite);

    // The reference: the whole weight as one tile.
    std::string weight;
    std::vector<uint64_t> digests;
    for (int64_t row = 0; row < rows; ++row) {
      weight.append(source_, offset + row * row_stride, cols * element);
      digests.push_back(Xxh3Of(source_.data() + offset + row * row_stride, cols * element));
    }
    AddDigest(module + ".weight", digests);
    const std::vector<quant::Region> regions = scheme.Regions(type, {rows, cols}, "compressed-tensors").value();
    std::vector<quant::RegionBuffer> buffers;
    std::vector<std::string> bytes(regions.size());
    for (size_t i = 0; i < regions.size(); ++i) {
      const quant::Region& region = regions[i];
      const int64_t region_rows = (rows * region.row_numerator + region.row_denominator - 1) / region.row_denominator;
      bytes[i] = region.constant.empty() ? std::string(region_rows * region.bytes_per_row, '\0') : region.constant;
      buffers.push_back({reinterpret_cast<std::byte*>(bytes[i].data()), 0, 0, region.bytes_per_row});
    }
    std::vector<quant::RowError> errors(rows);
    const quant::Tile tile{type, 0, rows, 0, cols, reinterpret_cast<const std::byte*>(weight.data()), cols * element};
    const absl::Status encoded =
        scheme.Encode(tile, {}, nullptr, nonfinite == "fail" ? quant::NonfinitePolicy::kFail : quant::NonfinitePolicy::kClamp, buffers,
                      absl::MakeSpan(errors));
    if (!encoded.ok()) valid_ = false;
    quern::v1::ModuleError error;
    error.set_module(module);
    error.set_count(rows * cols);
    for (const quant::RowError& row : errors) {
      error.set_sum_squared_error(error.sum_squared_error() + row.SumSquaredError());
      error.set_sum_squares(error.sum_squares() + row.SumSquares());
      error.set_max_abs_error(std::max(error.max_abs_error(), row.max_abs));
      error.set_nonfinite(error.nonfinite() + row.nonfinite);
    }
    errors_.push_back(error);
    for (size_t i = 0; i < regions.size(); ++i) {
      AddOutput(unit->add_outputs(), absl::StrCat(module, ".", regions[i].suffix), std::string(DTypeName(regions[i].dtype)),
                regions[i].shape, bytes[i].size());
      expected_ += bytes[i];
    }
  }

  // Writes the source file; the spec then carries its evidence.
  void Finish() {
    quern::v1::SourceFile* file = spec_.add_source_files();
    file->set_path(JoinPath(directory_, "source"));
    QUERN_ASSERT_OK(WriteFileDurably(file->path(), source_));
    struct stat info;
    ASSERT_EQ(stat(file->path().c_str(), &info), 0);
    file->set_size(source_.size());
    file->set_inode(info.st_ino);
    file->set_mtime_ns(int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec);
    file->set_header_size(1234);
    file->set_header_sha256(Sha256Of(source_.substr(0, 1234)));
    spec_.mutable_write_shard()->set_file_size(expected_.size());
  }

  quern::v1::TaskSpec& spec() { return spec_; }
  const std::string& expected() const { return expected_; }
  const std::vector<quern::v1::ModuleError>& errors() const { return errors_; }
  const std::vector<quern::v1::ViewDigest>& digests() const { return digests_; }
  bool valid() const { return valid_; }

  // The task that checks the shard at `path` against the source.
  quern::v1::TaskSpec CompareSpec(const std::string& path) const {
    quern::v1::TaskSpec spec;
    *spec.mutable_source_files() = spec_.source_files();
    spec.mutable_compare_shard()->set_path(path);
    size_t next_error = 0;
    for (const quern::v1::ShardUnit& unit : spec_.write_shard().units()) {
      if (unit.has_copy()) *spec.mutable_compare_shard()->add_units()->mutable_copy() = unit.copy();
      if (unit.has_quantize()) {
        quern::v1::CompareUnit* compare = spec.mutable_compare_shard()->add_units();
        *compare->mutable_quantize() = unit.quantize();
        *compare->mutable_expected() = errors_[next_error++];
      }
    }
    return spec;
  }

 private:
  static quern::v1::TensorView View(const std::string& name, const std::string& dtype, uint64_t offset, uint64_t rows, uint64_t cols,
                                    int64_t row_stride, int64_t col_stride) {
    quern::v1::TensorView view;
    view.set_tensor(name);
    view.set_dtype(dtype);
    view.set_offset(offset);
    view.set_rows(rows);
    view.set_cols(cols);
    view.set_row_stride(row_stride);
    view.set_col_stride(col_stride);
    return view;
  }

  void AddOutput(quern::v1::OutputTensor* output, const std::string& name, const std::string& dtype, const std::vector<uint64_t>& shape,
                 uint64_t size) {
    output->set_name(name);
    output->set_dtype(dtype);
    for (const uint64_t dimension : shape) output->add_shape(dimension);
    output->set_offset(next_);
    output->set_size(size);
    next_ += size;
  }

  void AddDigest(const std::string& tensor, const std::vector<uint64_t>& rows) {
    std::string bytes;
    for (const uint64_t row : rows) {
      for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(row >> (8 * i)));
    }
    quern::v1::ViewDigest digest;
    digest.set_tensor(tensor);
    digest.set_digest(Xxh3_128Of(bytes));
    digests_.push_back(digest);
  }

  const std::string directory_;
  std::string source_;
  std::string header_;
  std::string expected_;
  uint64_t next_ = 4096;
  bool valid_ = true;
  quern::v1::TaskSpec spec_;
  std::vector<quern::v1::ModuleError> errors_;
  std::vector<quern::v1::ViewDigest> digests_;
};

class RunTaskTest : public testing::Test {
 protected:
  TaskOptions Options(uint64_t memory = kMinimumTaskMemory, int threads = 2, ReaderMode reader = ReaderMode::kAuto) const {
    TaskOptions options;
    options.memory = memory;
    options.threads = threads;
    options.reader = reader;
    options.output_path = output_;
    return options;
  }
  TaskOptions ReadOptions(ReaderMode reader = ReaderMode::kAuto) const {
    TaskOptions options = Options(kMinimumTaskMemory, 2, reader);
    options.output_path.clear();
    return options;
  }

  void ExpectRight(ShardTask& task, const TaskOptions& options) {
    TaskControl control;
    const absl::StatusOr<quern::v1::TaskResult> result = RunTask(task.spec(), options, &control);
    QUERN_ASSERT_OK(result);
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string written, ReadFileToString(output_));
    ASSERT_EQ(written.size(), task.expected().size());
    for (size_t i = 0; i < written.size(); ++i) {
      if (written[i] != task.expected()[i]) {
        FAIL() << "byte " << i << " of " << written.size() << " differs";
      }
    }
    EXPECT_EQ(result->sha256(), Sha256Of(task.expected()));
    EXPECT_EQ(result->file_size(), written.size());
    EXPECT_EQ(result->header_sha256(), Sha256Of(task.spec().write_shard().header()));
    ASSERT_EQ(result->errors_size(), static_cast<int>(task.errors().size()));
    for (int i = 0; i < result->errors_size(); ++i) {
      EXPECT_EQ(result->errors(i).SerializeAsString(), task.errors()[i].SerializeAsString()) << result->errors(i).DebugString();
    }
    ASSERT_EQ(result->source_digests_size(), static_cast<int>(task.digests().size()));
    for (int i = 0; i < result->source_digests_size(); ++i) {
      EXPECT_EQ(result->source_digests(i).tensor(), task.digests()[i].tensor());
      EXPECT_EQ(result->source_digests(i).digest(), task.digests()[i].digest()) << task.digests()[i].tensor();
    }
    EXPECT_EQ(control.bytes_written, written.size());
    EXPECT_EQ(result->bytes_read(), control.bytes_read);
    EXPECT_THAT(ListDirectory(dir_.path()).value(), SizeIs(2)) << "source and shard, nothing else";
  }

  absl::Status Fails(const ShardTask& task, const TaskOptions& options) {
    TaskControl control;
    return RunTask(const_cast<ShardTask&>(task).spec(), options, &control).status();
  }

  const TempDir dir_ = TempDir::Make("run_task").value();
  const std::string output_ = JoinPath(dir_.path(), "shard");
};

constexpr char kGroup32[] = "int4 group=32 asymmetric observer=minmax numerics=reference";
constexpr char kGroup128[] = "int4 group=128 symmetric observer=minmax numerics=reference";
constexpr char kThreeBits[] = "int3 group=32 asymmetric observer=minmax numerics=precise";
constexpr char kSmallGroups[] = "int5 group=8 asymmetric observer=minmax numerics=reference";
constexpr char kChannel[] = "int8 channel symmetric observer=minmax numerics=reference";
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
    ExpectRight(task, Options(memory, threads, mode));
    TaskControl control;
    const absl::StatusOr<quern::v1::TaskResult> compared = RunTask(
        task.CompareSpec(output_),
        [&] {
          TaskOptions o = Options(memory, threads, mode);
          o.output_path.clear();
          return o;
        }(),
        &control);
    QUERN_ASSERT_OK(compared);
    EXPECT_THAT(compared->mismatches(), IsEmpty()) << compared->mismatches(0).DebugString();
    EXPECT_EQ(compared->errors_size(), static_cast<int>(task.errors().size()));
    ASSERT_EQ(compared->source_digests_size(), static_cast<int>(task.digests().size()));
    for (int i = 0; i < compared->source_digests_size(); ++i) {
      EXPECT_EQ(compared->source_digests(i).tensor(), task.digests()[i].tensor());
      EXPECT_EQ(compared->source_digests(i).digest(), task.digests()[i].digest()) << task.digests()[i].tensor();
    }
    QUERN_ASSERT_OK(RemoveFile(output_));
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
  expect_refused("no source file", [&](Spec& spec) { copy(spec)->mutable_source()->set_file(1); });
  expect_refused("ends at", [&](Spec& spec) { copy(spec)->mutable_output()->set_offset(4097); });
  expect_refused("ends at", [&](Spec& spec) { copy(spec)->mutable_output()->set_size(UINT64_MAX); });
  expect_refused("tensors end at", [&](Spec& spec) { spec.mutable_write_shard()->set_file_size(1); });
  expect_refused("leads out of", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_row_stride(1 << 20); });
  expect_refused("elements in a file", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_rows(UINT64_MAX); });
  expect_refused("overlaps", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_row_stride(-128); });
  expect_refused("contiguous", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_col_stride(64); });
  expect_refused("the scheme stores", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_rows(31); });
  expect_refused("multiple of the group size", [&](Spec& spec) { quantize(spec)->mutable_weight()->set_cols(63); });
  expect_refused("weight_scale_inv", [&](Spec& spec) { quantize(spec)->mutable_weight()->add_decode()->set_role("weight_scale_inv"); });
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
