// Elements a second of the integer kernels, error figures included: the scalar definition beside the best SIMD target of the machine.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "quant/kernels/integer_tile.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

constexpr int64_t kRows = 256;
constexpr int64_t kColumns = 2048;

// A tile with buffers for everything that it points to.
struct Work {
  Work(DType dtype, ElementType element, int bits, int64_t group, bool symmetric, bool precise)
      : weight(RandomWeight(dtype, {kRows, kColumns}, 1, /*unusual=*/false)),
        packed(kRows * kColumns),
        scales(kRows * kColumns),
        zero_points(kRows * kColumns),
        decoded(weight.bytes.size()),
        errors(kRows) {
    tile.format = {bits, symmetric, precise};
    tile.element = element;
    tile.rows = kRows;
    tile.columns = kColumns;
    tile.group = group == 0 ? kColumns : group;
    tile.elements = reinterpret_cast<const unsigned char*>(weight.bytes.data());
    tile.element_stride = kColumns * BytesPerElement(dtype);
    tile.packed = packed.data();
    tile.packed_stride = scalar::PackedBytes(kColumns, bits);
    tile.scales = scales.data();
    tile.scale_stride = kColumns / tile.group * BytesPerElement(dtype);
    tile.zero_points = zero_points.data();
    tile.zero_point_stride = kColumns / tile.group * 4;
    options.errors = errors.data();
  }

  TestWeight weight;
  std::vector<unsigned char> packed, scales, zero_points, decoded;
  std::vector<RowError> errors;
  IntegerTile tile;
  EncodeOptions options;
};

void Report(benchmark::State& state) { state.SetItemsProcessed(state.iterations() * kRows * kColumns); }

void RunEncode(benchmark::State& state, Work work, bool scalar) {
  for (auto _ : state) benchmark::DoNotOptimize(scalar ? EncodeScalar(work.tile, work.options) : Encode(work.tile, work.options));
  Report(state);
}

void RunDecode(benchmark::State& state, Work work, bool scalar) {
  Encode(work.tile, work.options);
  const auto decode = scalar ? DecodeScalar : Decode;
  for (auto _ : state) {
    decode(work.tile, work.decoded.data(), work.tile.element_stride);
    benchmark::ClobberMemory();
  }
  Report(state);
}

void RunErrors(benchmark::State& state, Work work, bool scalar) {
  const auto add = scalar ? AddErrorsScalar : AddErrors;
  for (auto _ : state) {
    add(work.tile, work.decoded.data(), work.tile.element_stride, work.errors.data());
    benchmark::ClobberMemory();
  }
  Report(state);
}

void Register(const std::string& name, DType dtype, ElementType element, int bits, int64_t group, bool symmetric, bool precise = false) {
  for (const bool scalar : {true, false}) {
    const std::string suffix = absl::StrCat("/", name, "/", scalar ? "scalar" : KernelTarget());
    const auto work = [=] { return Work(dtype, element, bits, group, symmetric, precise); };
    benchmark::RegisterBenchmark(("encode" + suffix).c_str(), [=](benchmark::State& state) { RunEncode(state, work(), scalar); });
    benchmark::RegisterBenchmark(("decode" + suffix).c_str(), [=](benchmark::State& state) { RunDecode(state, work(), scalar); });
    benchmark::RegisterBenchmark(("errors" + suffix).c_str(), [=](benchmark::State& state) { RunErrors(state, work(), scalar); });
  }
}

}  // namespace
}  // namespace quern::quant

int main(int argc, char** argv) {
  using namespace quern::quant;
  using quern::DType;
  Register("bf16_int4_g32_asym", DType::kBF16, ElementType::kBf16, 4, 32, false);
  Register("bf16_int4_g128_asym", DType::kBF16, ElementType::kBf16, 4, 128, false);
  Register("bf16_int4_g32_sym", DType::kBF16, ElementType::kBf16, 4, 32, true);
  Register("bf16_int4_channel_sym", DType::kBF16, ElementType::kBf16, 4, 0, true);
  Register("bf16_int8_g128_sym", DType::kBF16, ElementType::kBf16, 8, 128, true);
  Register("bf16_int3_g32_asym", DType::kBF16, ElementType::kBf16, 3, 32, false);
  Register("bf16_int4_g32_asym_precise", DType::kBF16, ElementType::kBf16, 4, 32, false, true);
  Register("f16_int4_g32_asym", DType::kF16, ElementType::kF16, 4, 32, false);
  Register("f32_int4_g32_asym", DType::kF32, ElementType::kF32, 4, 32, false);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
