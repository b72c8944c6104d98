// Seconds that one task takes: read, quantize, write, for weights of every layout. `pipeline_bench DIRECTORY [KIND]...`; the directory is
// on the disk to measure (or in memory, to measure the rest), and takes 3 GB.
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "quant/scheme.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

constexpr int64_t kModules = 64;
constexpr int64_t kRows = 2048;
constexpr int64_t kCols = 4096;
constexpr uint64_t kModuleBytes = kRows * kCols * 2;
constexpr uint64_t kSourceBytes = kModules * kModuleBytes;

struct Kind {
  const char* scheme;
  // Fills what says where the weight of a module stands.
  std::function<void(int64_t module, quern::v1::TensorView& view)> view;
  bool set = false;
  // Plain values of two modules go turned over into one stack: bytes between the rows of one, 2 for halves, 4 where they alternate.
  int64_t stack_step = 0;
};

void Plain(int64_t module, quern::v1::TensorView& view, int64_t row_stride, int64_t col_stride) {
  view.set_offset(static_cast<uint64_t>(module) * kModuleBytes);
  view.set_row_stride(row_stride);
  view.set_col_stride(col_stride);
}

void Encoded(int64_t module, quern::v1::TensorView& view, const char* scheme) {
  view.set_decode_scheme(scheme);
  const quant::Scheme& decode = *quant::Scheme::For(quant::SchemeSpec::Parse(scheme).value()).value();
  uint64_t offset = static_cast<uint64_t>(module) * kModuleBytes;
  const std::vector<quant::Region> regions = decode.Regions(DType::kBF16, {kRows, kCols}).value();
  for (const quant::Region& region : regions) {
    if (!region.constant.empty()) continue;
    quern::v1::TensorView& bytes = *view.add_decode()->mutable_view();
    const int64_t rows = (kRows * region.row_numerator + region.row_denominator - 1) / region.row_denominator;
    bytes.set_dtype("U8");
    bytes.set_rows(static_cast<uint64_t>(rows));
    bytes.set_cols(static_cast<uint64_t>(region.bytes_per_row));
    bytes.set_row_stride(region.bytes_per_row);
    bytes.set_col_stride(1);
    bytes.set_offset(offset);
    offset += static_cast<uint64_t>(rows * region.bytes_per_row);
  }
}

constexpr char kInt4[] = "int4 group=128 symmetric observer=minmax numerics=reference";
constexpr char kFp8Block[] = "float8 block=128 symmetric observer=minmax numerics=reference scale=f32";

const std::map<std::string, Kind>& Kinds() {
  static const auto* const kinds = new std::map<std::string, Kind>{
      {"rows", {kInt4, [](int64_t m, quern::v1::TensorView& view) { Plain(m, view, kCols * 2, 2); }}},
      {"transposed", {kInt4, [](int64_t m, quern::v1::TensorView& view) { Plain(m, view, 2, kRows * 2); }}},
      // Two weights in one stack of twice the rows: halves of each column, or every second element.
      {"halves",
       {kInt4,
        [](int64_t m, quern::v1::TensorView& view) {
          Plain(m / 2 * 2, view, 2, kRows * 4);
          view.set_offset(view.offset() + static_cast<uint64_t>(m % 2) * kRows * 2);
        }}},
      {"interleaved",
       {kInt4,
        [](int64_t m, quern::v1::TensorView& view) {
          Plain(m / 2 * 2, view, 4, kRows * 4);
          view.set_offset(view.offset() + static_cast<uint64_t>(m % 2) * 2);
        }}},
      {"fp8", {kInt4, [](int64_t m, quern::v1::TensorView& view) { Encoded(m, view, kFp8Block); }}},
      {"dequantize",
       {"plain16 tensor symmetric observer=minmax numerics=reference scale=bf16",
        [](int64_t m, quern::v1::TensorView& view) { Encoded(m, view, kFp8Block); }}},
      {"stack-halves",
       {"plain16 tensor symmetric observer=minmax numerics=reference scale=bf16",
        [](int64_t m, quern::v1::TensorView& view) { Encoded(m, view, kFp8Block); }, false, 2}},
      {"stack-interleaved",
       {"plain16 tensor symmetric observer=minmax numerics=reference scale=bf16",
        [](int64_t m, quern::v1::TensorView& view) { Encoded(m, view, kFp8Block); }, false, 4}},
      {"copy",
       {"plain16 tensor symmetric observer=minmax numerics=reference scale=bf16",
        [](int64_t m, quern::v1::TensorView& view) { Plain(m, view, kCols * 2, 2); }}},
      {"nvfp4",
       {"float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3",
        [](int64_t m, quern::v1::TensorView& view) { Plain(m, view, kCols * 2, 2); }, true}},
  };
  return *kinds;
}

absl::Status Write(const std::string& path) {
  // Small BF16 numbers with and without sign; as F32 or FP8 finite, too.
  std::string piece(16 * kMiB, '\0');
  uint64_t state = 1;
  for (size_t i = 0; i < piece.size(); i += 2) {
    state = state * 6364136223846793005 + 1442695040888963407;
    piece[i] = static_cast<char>(state >> 58);
    piece[i + 1] = static_cast<char>(0x3C + (state >> 40 & 1) - (state >> 41 & 1) * 0x80);
  }
  std::string bytes;
  for (uint64_t at = 0; at < kSourceBytes; at += piece.size()) bytes += piece;
  return WriteFileDurably(path, bytes);
}

quern::v1::TaskSpec Task(const std::string& source, const Kind& kind) {
  quern::v1::TaskSpec spec;
  spec.add_source_files()->set_path(source);
  spec.mutable_source_files(0)->set_size(kSourceBytes);
  spec.set_bytes_to_read(kSourceBytes);
  quern::v1::WriteShard& work = *spec.mutable_write_shard();
  work.set_header(std::string(4096, 'h'));
  const quant::Scheme& scheme = *quant::Scheme::For(quant::SchemeSpec::Parse(kind.scheme).value()).value();
  uint64_t offset = 4096;
  for (int64_t module = 0; module < kModules; ++module) {
    quern::v1::QuantizeUnit& unit = *work.add_units()->mutable_quantize();
    unit.set_module(absl::StrCat("module", module));
    unit.set_scheme(kind.scheme);
    const auto fill = [&](int64_t of, quern::v1::TensorView& view) {
      view.set_tensor(absl::StrCat("weight", of));
      view.set_dtype("BF16");
      view.set_rows(kRows);
      view.set_cols(kCols);
      kind.view(of, view);
    };
    fill(module, *unit.mutable_weight());
    if (kind.set) {
      unit.set_statistics_key(absl::StrCat(module / 2));
      for (const int64_t of : {module / 2 * 2, module / 2 * 2 + 1}) fill(of, *unit.add_statistics_set());
    }
    const std::vector<quant::Region> regions = scheme.Regions(DType::kBF16, {kRows, kCols}).value();
    for (const quant::Region& region : regions) {
      quern::v1::OutputTensor& output = *unit.add_outputs();
      uint64_t size = static_cast<uint64_t>(BitsPerElement(region.dtype) / 8);
      for (const uint64_t dimension : region.shape) size *= dimension;
      output.set_offset(offset);
      output.set_size(size);
      offset += size;
      if (kind.stack_step == 0) continue;
      output.set_name("stack");
      output.set_dtype("BF16");
      output.set_offset(4096);
      output.set_size(kSourceBytes);
      quern::v1::StackPlace& place = *unit.mutable_place();
      place.set_offset(static_cast<uint64_t>(module / 2 * 2) * kModuleBytes +
                       static_cast<uint64_t>(module % 2 * (kind.stack_step == 2 ? kRows * 2 : 2)));
      place.set_row_stride(kind.stack_step);
      place.set_col_stride(kRows * 4);
    }
  }
  work.set_file_size(offset);
  spec.set_bytes_to_write(offset);
  return spec;
}

int Run(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: pipeline_bench DIRECTORY [KIND]...\n");
    return 2;
  }
  const std::string source = JoinPath(argv[1], "pipeline_bench.source"), output = JoinPath(argv[1], "pipeline_bench.output");
  const auto give_up = [](const absl::Status& status) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  };
  if (absl::Status status = Write(source); !status.ok()) return give_up(status);
  std::vector<std::string> names(argv + 2, argv + argc);
  for (const auto& [name, kind] : Kinds()) {
    if (argc == 2) names.push_back(name);
  }
  const char* const threads = std::getenv("QUERN_BENCH_THREADS");
  const char* const memory = std::getenv("QUERN_BENCH_MEMORY_MIB");
  for (const std::string& name : names) {
    const auto kind = Kinds().find(name);
    if (kind == Kinds().end()) return give_up(absl::InvalidArgumentError(absl::StrCat("no kind \"", name, "\"")));
    TaskOptions options;
    options.memory = (memory != nullptr ? static_cast<uint64_t>(std::atoi(memory)) : 512) * kMiB;
    options.threads = threads != nullptr ? std::atoi(threads) : 2;
    options.output_path = output;
    TaskControl control;
    const absl::StatusOr<quern::v1::TaskResult> result = RunTask(Task(source, kind->second), options, &control);
    if (!result.ok()) return give_up(result.status());
    const quern::v1::StageTimes& times = result->times();
    const double weights = static_cast<double>(kSourceBytes) / 1e9;
    std::printf("%-17s %6.2f s, %5.2f GB/s of weights, compute %5.2f s (%5.2f GB/s a thread), read %.2f GB, wrote %.2f GB, hash %.2f s\n",
                name.c_str(), times.wall_seconds(), weights / times.wall_seconds(), times.compute_seconds(),
                weights / times.compute_seconds(), static_cast<double>(result->bytes_read()) / 1e9,
                static_cast<double>(result->bytes_written()) / 1e9, times.hash_seconds());
    if (absl::Status status = RemoveFile(output); !status.ok()) return give_up(status);
  }
  if (absl::Status status = RemoveFile(source); !status.ok()) return give_up(status);
  return 0;
}

}  // namespace
}  // namespace quern::worker

int main(int argc, char** argv) { return quern::worker::Run(argc, argv); }
