// Elements a second of the integer and float kernels, error figures included: the scalar definition beside the best SIMD target of the
// machine.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "quant/block_sample.h"
#include "quant/kernels/float_tile.h"
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

// A search for the ranges of all groups, which comes before encoding.
void RegisterSearch(const std::string& name, int bits, int64_t group, bool symmetric, bool weighted) {
  for (const bool scalar : {true, false}) {
    benchmark::RegisterBenchmark(absl::StrCat("search/", name, "/", scalar ? "scalar" : KernelTarget()).c_str(),
                                 [=](benchmark::State& state) {
                                   Work work(DType::kBF16, ElementType::kBf16, bits, group, symmetric, false);
                                   const std::vector<float> importance(kColumns, 1.5f);
                                   std::vector<scalar::Range> ranges(kRows * kColumns / work.tile.group);
                                   scalar::RangeSearch search;
                                   if (weighted) {
                                     search.norm = scalar::SearchNorm::kWeightedCube;
                                     search.importance = importance.data();
                                   }
                                   const auto run = scalar ? SearchScalar : Search;
                                   for (auto _ : state) {
                                     run(work.tile, search, ranges.data());
                                     benchmark::ClobberMemory();
                                   }
                                   Report(state);
                                 });
  }
}

FloatTile Nvfp4Tile(const TestWeight& weight) {
  FloatTile tile;
  tile.format.bits = 4;
  tile.format.scaling = scalar::FloatScaling::kNvfp4;
  tile.set_scale = 2688;
  tile.rows = weight.shape.rows;
  tile.columns = weight.shape.cols;
  tile.group = 16;
  tile.elements = reinterpret_cast<const unsigned char*>(weight.bytes.data());
  tile.element_stride = weight.shape.cols * 2;
  return tile;
}

// The scales of the blocks of NVFP4.
void RegisterNvfp4(const std::string& name, scalar::SearchNorm norm) {
  for (const bool scalar : {true, false}) {
    benchmark::RegisterBenchmark(absl::StrCat("search/", name, "/", scalar ? "scalar" : KernelTarget()).c_str(),
                                 [=](benchmark::State& state) {
                                   const TestWeight weight = RandomWeight(DType::kBF16, {kRows, kColumns}, 1, /*unusual=*/false);
                                   std::vector<unsigned char> scales(kRows * kColumns / 16);
                                   FloatTile tile = Nvfp4Tile(weight);
                                   tile.scales = scales.data();
                                   tile.scale_stride = kColumns / 16;
                                   scalar::RangeSearch search;
                                   search.norm = norm;
                                   for (auto _ : state) {
                                     scalar ? SearchFloatScalesScalar(tile, search) : SearchFloatScales(tile, search);
                                     benchmark::ClobberMemory();
                                   }
                                   Report(state);
                                 });
  }
}

// The choice of NVFP4's global scale for gate and up of an expert, 768 x 2048 each: the pass over the weights, and the search.
void RegisterGlobalScale() {
  benchmark::RegisterBenchmark(absl::StrCat("global_scale/bf16_nvfp4_mse/", KernelTarget()).c_str(), [](benchmark::State& state) {
    const TestWeight weight = RandomWeight(DType::kBF16, {2 * 768, 2048}, 1, /*unusual=*/false);
    const FloatTile tile = Nvfp4Tile(weight);
    for (auto _ : state) {
      BlockSample sample;
      float amax = 0;
      sample.Observe(tile, 0, 0, &amax);
      benchmark::DoNotOptimize(sample.BestGlobalScale(tile.format, amax));
    }
    state.SetItemsProcessed(state.iterations() * weight.shape.rows * weight.shape.cols);
  });
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

// A tile of floats: with given scales in groups of 128 columns (FP8), or with those of the format.
struct FloatWork {
  FloatWork(DType dtype, ElementType element, const scalar::FloatFormat& format)
      : weight(RandomWeight(dtype, {kRows, kColumns}, 1, /*unusual=*/false)),
        codes(kRows * kColumns),
        scales(kRows * kColumns),
        decoded(weight.bytes.size()),
        given(kColumns / 128, scalar::FloatScale{0x1p-8f, 0x1p-8f}),
        errors(kRows) {
    tile.format = format;
    tile.element = element;
    tile.rows = kRows;
    tile.columns = kColumns;
    tile.elements = reinterpret_cast<const unsigned char*>(weight.bytes.data());
    tile.element_stride = kColumns * BytesPerElement(dtype);
    tile.codes = codes.data();
    tile.code_stride = kColumns * format.bits / 8;
    const bool is_given = format.scaling == scalar::FloatScaling::kGiven;
    tile.group = is_given ? 128 : format.scaling == scalar::FloatScaling::kMx ? 32 : 16;
    tile.given = is_given ? given.data() : nullptr;
    tile.scales = scales.data();
    tile.scale_stride = kColumns / tile.group;
    tile.set_scale = format.scaling == scalar::FloatScaling::kNvfp4 ? 300.0f : 0.003f;
    options.errors = errors.data();
  }

  TestWeight weight;
  std::vector<unsigned char> codes, scales, decoded;
  std::vector<scalar::FloatScale> given;
  std::vector<RowError> errors;
  FloatTile tile;
  FloatOptions options;
};

void RunFloatEncode(benchmark::State& state, FloatWork work, bool scalar) {
  for (auto _ : state) {
    benchmark::DoNotOptimize(scalar ? EncodeFloatsScalar(work.tile, work.options) : EncodeFloats(work.tile, work.options));
  }
  Report(state);
}

void RunFloatDecode(benchmark::State& state, FloatWork work, bool scalar) {
  EncodeFloats(work.tile, work.options);
  const auto decode = scalar ? DecodeFloatsScalar : DecodeFloats;
  for (auto _ : state) {
    decode(work.tile, work.decoded.data(), work.tile.element_stride);
    benchmark::ClobberMemory();
  }
  Report(state);
}

// The largest magnitude of the tile.
void RunObserve(benchmark::State& state, FloatWork work, bool scalar) {
  work.tile.group = kColumns;
  float amax = 0;
  for (auto _ : state) {
    (scalar ? ObserveAmaxScalar : ObserveAmax)(work.tile, &amax, 0);
    benchmark::ClobberMemory();
  }
  Report(state);
}

void RegisterFloat(const std::string& name, DType dtype, ElementType element, const scalar::FloatFormat& format) {
  for (const bool scalar : {true, false}) {
    const std::string suffix = absl::StrCat("/", name, "/", scalar ? "scalar" : KernelTarget());
    const auto work = [=] { return FloatWork(dtype, element, format); };
    benchmark::RegisterBenchmark(("encode" + suffix).c_str(), [=](benchmark::State& state) { RunFloatEncode(state, work(), scalar); });
    benchmark::RegisterBenchmark(("decode" + suffix).c_str(), [=](benchmark::State& state) { RunFloatDecode(state, work(), scalar); });
    benchmark::RegisterBenchmark(("amax" + suffix).c_str(), [=](benchmark::State& state) { RunObserve(state, work(), scalar); });
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
  using quern::quant::scalar::FloatScaling;
  RegisterFloat("bf16_fp8", DType::kBF16, ElementType::kBf16, {8, FloatScaling::kGiven, false, true});
  RegisterFloat("bf16_nvfp4", DType::kBF16, ElementType::kBf16, {4, FloatScaling::kNvfp4, false, false});
  RegisterFloat("bf16_modelopt_nvfp4", DType::kBF16, ElementType::kBf16, {4, FloatScaling::kModelOptNvfp4, false, false});
  RegisterFloat("bf16_mxfp4", DType::kBF16, ElementType::kBf16, {4, FloatScaling::kMx, false, true});
  RegisterFloat("bf16_mxfp8", DType::kBF16, ElementType::kBf16, {8, FloatScaling::kMx, false, true});
  RegisterFloat("f16_nvfp4", DType::kF16, ElementType::kF16, {4, FloatScaling::kNvfp4, false, false});
  RegisterFloat("f32_fp8", DType::kF32, ElementType::kF32, {8, FloatScaling::kGiven, false, true});
  RegisterSearch("bf16_int4_g128_sym_mse", 4, 128, true, false);
  RegisterSearch("bf16_int4_g32_asym_mse", 4, 32, false, false);
  RegisterSearch("bf16_int8_channel_sym_mse", 8, 0, true, false);
  RegisterSearch("bf16_int4_g32_asym_importance", 4, 32, false, true);
  RegisterNvfp4("bf16_nvfp4_mse", scalar::SearchNorm::kPower24);
  RegisterNvfp4("bf16_nvfp4_sweep", scalar::SearchNorm::kSquare);
  RegisterGlobalScale();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
