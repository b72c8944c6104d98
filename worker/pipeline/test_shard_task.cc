#include "worker/pipeline/test_shard_task.h"

#include <string.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "quant/scheme.h"
#include "worker/io/buffer_pool.h"
#include "worker/pipeline/generate.h"

namespace quern::worker {
namespace {

const quant::Scheme& SchemeOf(const std::string& text) { return *quant::Scheme::For(quant::SchemeSpec::Parse(text).value()).value(); }

quern::v1::TensorView View(const std::string& name, const std::string& dtype, uint64_t offset, uint64_t rows, uint64_t cols,
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

// A weight encoded whole, as one tile.
struct Encoding {
  std::vector<quant::Region> regions;
  std::vector<std::string> bytes;
  std::vector<quant::RowError> errors;
  bool valid = true;
};

quant::Tile TileOf(const TestSource& source) {
  const DType dtype = ParseDType(source.view.dtype()).value();
  const auto rows = static_cast<int64_t>(source.view.rows()), cols = static_cast<int64_t>(source.view.cols());
  return {dtype, 0, rows, 0, cols, reinterpret_cast<const std::byte*>(source.values.data()), cols * BytesPerElement(dtype)};
}

Encoding Encode(const quant::Scheme& scheme, const TestSource& source, const ShardTask::Options& options) {
  const quant::Tile tile = TileOf(source);
  const quant::Shape2D shape{tile.rows(), tile.cols()};
  quant::ModuleInputs inputs;
  inputs.activation_amax = options.activation_amax;
  inputs.importance = options.importance;
  std::unique_ptr<quant::Statistics> statistics;
  Encoding encoding;
  if (scheme.NeedsStatistics(shape, shape)) {
    statistics = scheme.NewStatistics(shape);
    encoding.valid &= scheme.Observe(tile, inputs, *statistics).ok();
    for (const TestSource& member : options.set) encoding.valid &= scheme.Observe(TileOf(member), {}, *statistics).ok();
  }
  encoding.regions = scheme.Regions(tile.dtype, shape).value();
  std::vector<std::string> computed = scheme.ComputedRegions(tile.dtype, shape, statistics.get(), inputs).value();
  std::reverse(computed.begin(), computed.end());
  std::vector<quant::RegionBuffer> buffers;
  encoding.bytes.resize(encoding.regions.size());
  for (size_t i = 0; i < encoding.regions.size(); ++i) {
    const quant::Region& region = encoding.regions[i];
    const int64_t region_rows = (shape.rows * region.row_numerator + region.row_denominator - 1) / region.row_denominator;
    if (region.computed) {
      encoding.bytes[i] = computed.back();
      computed.pop_back();
    } else {
      encoding.bytes[i] = region.constant.empty() ? std::string(region_rows * region.bytes_per_row, '\0') : region.constant;
    }
    buffers.push_back({reinterpret_cast<std::byte*>(encoding.bytes[i].data()), 0, 0, region.bytes_per_row});
  }
  encoding.errors.resize(shape.rows);
  encoding.valid &= scheme
                        .Encode(tile, inputs, statistics.get(),
                                options.nonfinite == "fail" ? quant::NonfinitePolicy::kFail : quant::NonfinitePolicy::kClamp, buffers,
                                absl::MakeSpan(encoding.errors))
                        .ok();
  return encoding;
}

}  // namespace

ShardTask::ShardTask(const std::string& directory) : directory_(directory) {
  // Data begins anywhere: tensors of real files are not aligned to blocks.
  source().assign(1234, 's');
  other().assign(77, 'o');
  expected_.assign(4096, 'h');
  spec_.mutable_write_shard()->set_header(expected_);
}

uint64_t ShardTask::AddWeight(const std::string& name, const std::string& dtype, int64_t rows, int64_t cols) {
  quern::v1::GenerateUnit unit;
  unit.set_distribution("normal");
  unit.set_seed(source().size());
  unit.set_standard_deviation(0.05);
  unit.mutable_output()->set_name(name);
  unit.mutable_output()->set_dtype(dtype);
  unit.mutable_output()->add_shape(rows);
  unit.mutable_output()->add_shape(cols);
  unit.mutable_output()->set_size(rows * cols * (dtype == "F32" ? 4 : 2));
  const uint64_t offset = source().size();
  source().resize(offset + unit.output().size());
  worker::Generator::For(unit).value().Fill(0, rows * cols, reinterpret_cast<std::byte*>(source().data() + offset));
  return offset;
}

TestSource ShardTask::Dense(const std::string& name, const std::string& dtype, uint64_t offset, int64_t rows, int64_t cols,
                            int64_t row_stride) const {
  const int64_t element = BytesPerElement(ParseDType(dtype).value());
  return Strided(name, dtype, offset, rows, cols, row_stride == 0 ? cols * element : row_stride, element);
}

TestSource ShardTask::Strided(const std::string& name, const std::string& dtype, uint64_t offset, int64_t rows, int64_t cols,
                              int64_t row_stride, int64_t col_stride) const {
  const int64_t element = BytesPerElement(ParseDType(dtype).value());
  TestSource source{View(name, dtype, offset, rows, cols, row_stride, col_stride), std::string(rows * cols * element, '\0')};
  char* to = source.values.data();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col, to += element) {
      memcpy(to, files_[0].data() + offset + row * row_stride + col * col_stride, element);
    }
  }
  return source;
}

TestSource ShardTask::Encoded(const std::string& name, const std::string& dtype, const std::string& scheme_text, int64_t rows, int64_t cols,
                              uint64_t gap, bool spread) {
  const quant::Scheme& scheme = SchemeOf(scheme_text);
  // The plain values do not stay in the source.
  const uint64_t at = AddWeight(name, dtype, rows, cols);
  TestSource source = Dense(name, dtype, at, rows, cols);
  files_[0].resize(at);
  Encoding encoding = Encode(scheme, source, {});
  valid_ &= encoding.valid;
  source.view.set_decode_scheme(scheme_text);
  source.view.clear_row_stride();
  source.view.clear_col_stride();
  std::vector<quant::RegionBuffer> buffers;
  for (size_t i = 0; i < encoding.regions.size(); ++i) {
    const quant::Region& region = encoding.regions[i];
    std::string& bytes = encoding.bytes[i];
    buffers.push_back({reinterpret_cast<std::byte*>(bytes.data()), 0, 0, region.bytes_per_row});
    const uint32_t file = spread && (region.computed || i % 2 == 1) ? 1 : 0;
    const uint64_t row_bytes = region.computed || !region.constant.empty() ? bytes.size() : static_cast<uint64_t>(region.bytes_per_row);
    quern::v1::DecodeInput* input = source.view.add_decode();
    input->set_role(region.suffix);
    *input->mutable_view() = View(absl::StrCat(name, ".", region.suffix), "U8", files_[file].size(), bytes.size() / row_bytes, row_bytes,
                                  static_cast<int64_t>(row_bytes + gap), 1);
    input->mutable_view()->set_file(file);
    for (uint64_t row = 0; row < bytes.size(); row += row_bytes) {
      if (row > 0) files_[file].append(gap, 'g');
      files_[file].append(bytes, row, row_bytes);
    }
    files_[file].append(1 + i, 'z');
  }
  source.view.set_offset(source.view.decode(0).view().offset());
  source.view.set_file(source.view.decode(0).view().file());
  const quant::Tile tile = TileOf(source);
  valid_ &= scheme.Decode(tile, buffers, reinterpret_cast<std::byte*>(source.values.data())).ok();
  return source;
}

void ShardTask::Copy(const std::string& name, uint64_t offset, uint64_t size) {
  quern::v1::CopyUnit* unit = spec_.mutable_write_shard()->add_units()->mutable_copy();
  *unit->mutable_source() = View(name, "U8", offset, 1, size, size, 1);
  AddOutput(unit->mutable_output(), name, "U8", {size}, size);
  expected_.append(source(), offset, size);
  AddDigest(name, {Xxh3Of(source().data() + offset, size)});
}

void ShardTask::Generate(const std::string& name, const std::string& dtype, uint64_t rows, uint64_t cols) {
  quern::v1::GenerateUnit* unit = spec_.mutable_write_shard()->add_units()->mutable_generate();
  unit->set_distribution("normal");
  unit->set_seed(9);
  unit->set_standard_deviation(1);
  AddOutput(unit->mutable_output(), name, dtype, {rows, cols}, rows * cols * (dtype == "F32" ? 4 : 2));
  const uint64_t at = expected_.size();
  expected_.resize(at + unit->output().size());
  worker::Generator::For(*unit).value().Fill(0, rows * cols, reinterpret_cast<std::byte*>(expected_.data() + at));
}

void ShardTask::Quantize(const std::string& module, const std::string& scheme, const std::string& dtype, uint64_t offset, int64_t rows,
                         int64_t cols, int64_t row_stride, const std::string& nonfinite) {
  Options options;
  options.nonfinite = nonfinite;
  Quantize(module, scheme, Dense(module + ".weight", dtype, offset, rows, cols, row_stride), options);
}

quern::v1::QuantizeUnit* ShardTask::Quantize(const std::string& module, const std::string& scheme_text, const TestSource& weight,
                                             const Options& options) {
  const quant::Scheme& scheme = SchemeOf(scheme_text);
  quern::v1::QuantizeUnit* unit = spec_.mutable_write_shard()->add_units()->mutable_quantize();
  unit->set_module(module);
  *unit->mutable_weight() = weight.view;
  unit->set_scheme(scheme_text);
  unit->set_nonfinite(options.nonfinite);
  for (const TestSource& member : options.set) *unit->add_statistics_set() = member.view;
  unit->set_statistics_key(options.key);
  if (options.activation_amax.has_value()) unit->set_activation_amax(*options.activation_amax);
  if (!options.importance.empty()) {
    quern::v1::DecodeInput* input = unit->add_inputs();
    input->set_role("importance");
    const uint64_t size = options.importance.size() * sizeof(float);
    *input->mutable_view() =
        View(module + ".importance", "F32", other().size(), 1, options.importance.size(), static_cast<int64_t>(size), 4);
    input->mutable_view()->set_file(1);
    other().append(reinterpret_cast<const char*>(options.importance.data()), size);
    other().append(3, 'i');
  }

  const Encoding encoding = Encode(scheme, weight, options);
  valid_ &= encoding.valid;
  const quant::Tile tile = TileOf(weight);
  std::vector<uint64_t> digests;
  for (int64_t row = 0; row < tile.rows(); ++row) digests.push_back(Xxh3Of(tile.data + row * tile.row_stride, tile.row_stride));
  AddDigest(weight.view.tensor(), digests);
  quern::v1::ModuleError error;
  error.set_module(module);
  error.set_count(tile.rows() * tile.cols());
  for (const quant::RowError& row : encoding.errors) {
    error.set_sum_squared_error(error.sum_squared_error() + row.SumSquaredError());
    error.set_sum_squares(error.sum_squares() + row.SumSquares());
    error.set_max_abs_error(std::max(error.max_abs_error(), row.max_abs));
    error.set_nonfinite(error.nonfinite() + row.nonfinite);
  }
  errors_.push_back(error);
  for (size_t i = 0; i < encoding.regions.size(); ++i) {
    const quant::Region& region = encoding.regions[i];
    AddOutput(unit->add_outputs(), absl::StrCat(module, ".", region.suffix), std::string(DTypeName(region.dtype)), region.shape,
              encoding.bytes[i].size());
    expected_ += encoding.bytes[i];
  }
  return unit;
}

void ShardTask::Stack(const std::string& name, const std::string& scheme, const std::vector<TestSource>& weights, size_t parts,
                      bool transposed, bool interleaved) {
  const uint64_t begin = next_;
  const uint64_t rows = weights.front().view.rows(), cols = weights.front().view.cols();
  const size_t first_unit = static_cast<size_t>(spec_.write_shard().units_size());
  std::vector<std::string> values;
  for (size_t i = 0; i < weights.size(); ++i) {
    Quantize(absl::StrCat(name, ".", i), scheme, weights[i], {});
    values.push_back(expected_.substr(begin));
    expected_.resize(begin);
  }
  const uint64_t element = values.front().size() / (rows * cols);
  std::string bytes(values.size() * rows * cols * element, '?');
  for (size_t i = 0; i < weights.size(); ++i) {
    const uint64_t part = i % parts, slab = i / parts * parts * rows * cols;
    const uint64_t row_stride = transposed ? (interleaved ? parts : 1) : cols, col_stride = transposed ? parts * rows : 1;
    const uint64_t first = slab + (transposed ? part * (interleaved ? 1 : rows) : part * rows * cols);
    quern::v1::QuantizeUnit* unit = spec_.mutable_write_shard()->mutable_units(static_cast<int>(first_unit + i))->mutable_quantize();
    unit->mutable_place()->set_offset(first * element);
    unit->mutable_place()->set_row_stride(static_cast<int64_t>(row_stride * element));
    unit->mutable_place()->set_col_stride(static_cast<int64_t>(col_stride * element));
    quern::v1::OutputTensor* output = unit->mutable_outputs(0);
    output->set_name(name);
    output->clear_shape();
    for (const uint64_t dimension : {weights.size() / parts, transposed ? cols : parts * rows, transposed ? parts * rows : cols}) {
      output->add_shape(dimension);
    }
    output->set_offset(begin);
    output->set_size(bytes.size());
    for (uint64_t row = 0; row < rows; ++row) {
      for (uint64_t col = 0; col < cols; ++col) {
        memcpy(bytes.data() + (first + row * row_stride + col * col_stride) * element, values[i].data() + (row * cols + col) * element,
               element);
      }
    }
  }
  expected_ += bytes;
  next_ = begin + bytes.size();
}

void ShardTask::Finish() {
  for (int i = 0; i < 2; ++i) {
    quern::v1::SourceFile* file = spec_.add_source_files();
    file->set_path(JoinPath(directory_, i == 0 ? "source" : "other"));
    QUERN_ASSERT_OK(WriteFileDurably(file->path(), files_[i]));
    struct stat info;
    ASSERT_EQ(stat(file->path().c_str(), &info), 0);
    file->set_size(files_[i].size());
    file->set_inode(info.st_ino);
    file->set_mtime_ns(int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec);
    file->set_header_size(77);
    file->set_header_sha256(Sha256Of(files_[i].substr(0, 77)));
  }
  spec_.mutable_write_shard()->set_file_size(expected_.size());
}

quern::v1::TaskSpec ShardTask::CompareSpec(const std::string& path) const {
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

void ShardTask::AddOutput(quern::v1::OutputTensor* output, const std::string& name, const std::string& dtype,
                          const std::vector<uint64_t>& shape, uint64_t size) {
  output->set_name(name);
  output->set_dtype(dtype);
  for (const uint64_t dimension : shape) output->add_shape(dimension);
  output->set_offset(next_);
  output->set_size(size);
  next_ += size;
}

void ShardTask::AddDigest(const std::string& tensor, const std::vector<uint64_t>& rows) {
  std::string bytes;
  for (const uint64_t row : rows) {
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(row >> (8 * i)));
  }
  quern::v1::ViewDigest digest;
  digest.set_tensor(tensor);
  digest.set_digest(Xxh3_128Of(bytes));
  digests_.push_back(digest);
}

TaskOptions RunTaskTest::Options(uint64_t memory, int threads, ReaderMode reader) const {
  TaskOptions options;
  options.memory = memory;
  options.threads = threads;
  options.reader = reader;
  options.output_path = output_;
  return options;
}

TaskOptions RunTaskTest::ReadOptions(ReaderMode reader, uint64_t memory) const {
  TaskOptions options = Options(memory, 2, reader);
  options.output_path.clear();
  return options;
}

quern::v1::TaskResult RunTaskTest::ExpectRight(ShardTask& task, const TaskOptions& options) {
  EXPECT_TRUE(task.valid()) << "the reference itself failed";
  TaskControl control;
  const absl::StatusOr<quern::v1::TaskResult> result = RunTask(task.spec(), options, &control);
  EXPECT_THAT(result, IsOk());
  if (!result.ok()) return {};
  const std::string written = ReadFileToString(output_).value_or("");
  EXPECT_EQ(written.size(), task.expected().size());
  const size_t same = std::mismatch(written.begin(), written.end(), task.expected().begin(), task.expected().end()).first - written.begin();
  EXPECT_EQ(same, written.size()) << "the first byte that differs";
  EXPECT_EQ(result->sha256(), Sha256Of(task.expected()));
  EXPECT_EQ(result->file_size(), written.size());
  EXPECT_EQ(result->header_sha256(), Sha256Of(task.spec().write_shard().header()));
  EXPECT_EQ(result->errors_size(), static_cast<int>(task.errors().size()));
  for (int i = 0; i < result->errors_size(); ++i) {
    EXPECT_EQ(result->errors(i).SerializeAsString(), task.errors()[i].SerializeAsString()) << result->errors(i).DebugString();
  }
  EXPECT_EQ(result->source_digests_size(), static_cast<int>(task.digests().size()));
  for (int i = 0; i < result->source_digests_size(); ++i) {
    EXPECT_EQ(result->source_digests(i).tensor(), task.digests()[i].tensor());
    EXPECT_EQ(result->source_digests(i).digest(), task.digests()[i].digest()) << task.digests()[i].tensor();
  }
  EXPECT_EQ(control.bytes_written, written.size());
  EXPECT_EQ(result->bytes_read(), control.bytes_read);
  EXPECT_THAT(ListDirectory(dir_.path()).value(), testing::SizeIs(3)) << "sources and shard, nothing else";
  return *result;
}

void RunTaskTest::ExpectRightAndEqual(ShardTask& task, const TaskOptions& options) {
  ExpectRight(task, options);
  TaskOptions reading = options;
  reading.output_path.clear();
  TaskControl control;
  const absl::StatusOr<quern::v1::TaskResult> compared = RunTask(task.CompareSpec(output_), reading, &control);
  EXPECT_THAT(compared, IsOk());
  if (compared.ok()) {
    EXPECT_EQ(compared->mismatches_size(), 0) << (compared->mismatches_size() > 0 ? compared->mismatches(0).DebugString() : "");
    EXPECT_EQ(compared->errors_size(), static_cast<int>(task.errors().size()));
    EXPECT_EQ(compared->source_digests_size(), static_cast<int>(task.digests().size()));
    for (int i = 0; i < compared->source_digests_size() && i < static_cast<int>(task.digests().size()); ++i) {
      EXPECT_EQ(compared->source_digests(i).tensor(), task.digests()[i].tensor());
      EXPECT_EQ(compared->source_digests(i).digest(), task.digests()[i].digest()) << task.digests()[i].tensor();
    }
  }
  EXPECT_THAT(RemoveFile(output_), IsOk());
}

absl::Status RunTaskTest::Fails(const ShardTask& task, const TaskOptions& options) {
  TaskControl control;
  return RunTask(const_cast<ShardTask&>(task).spec(), options, &control).status();
}

}  // namespace quern::worker
