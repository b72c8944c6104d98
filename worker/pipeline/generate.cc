#include "worker/pipeline/generate.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <bit>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

// The distribution function of the standard normal minus 1/2, by its power series. For 0 <= x < 4 the terms stay below 3000, so that 1e-12
// is left.
double CenteredNormal(double x) {
  constexpr double kInverseSqrtTwoPi = 0.3989422804014327;
  double power = x, sum = x;
  for (int n = 1; n < 80; ++n) {
    power = -power * x * x / (2 * n);
    sum = sum + power / (2 * n + 1);
  }
  return sum * kInverseSqrtTwoPi;
}

std::array<float, kQuantiles> MakeQuantiles() {
  std::array<float, kQuantiles> table;
  for (int q = 0; q < kQuantiles / 2; ++q) {
    const double p = (q + 0.5) / kQuantiles;  // above the median
    double low = 0, high = 4;
    for (int step = 0; step < 44; ++step) {
      const double middle = (low + high) / 2;
      (CenteredNormal(middle) < p ? low : high) = middle;
    }
    const auto value = static_cast<float>((low + high) / 2);
    table[kQuantiles / 2 + q] = value;
    table[kQuantiles / 2 - 1 - q] = -value;
  }
  return table;
}

struct BF16Bits {
  uint16_t bits;
  static BF16Bits From(float value) {
    const auto u = std::bit_cast<uint32_t>(value);
    return {static_cast<uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16)};  // values are finite
  }
};

struct F16Bits {
  uint16_t bits;
  static F16Bits From(float value) {
    const auto u = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint16_t>((u >> 16) & 0x8000);
    const uint32_t magnitude = u & 0x7FFFFFFF;
    if (magnitude >= 0x477FF000) return {static_cast<uint16_t>(sign | 0x7BFF)};  // rounds beyond the largest: stay finite
    if (magnitude < 0x38800000) {
      // Subnormal: adding 0.5 puts the unit in the last place of f32 at 2^-24, which rounds as F16 does.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000))};
    }
    const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
  }
};

struct F32Bits {
  float value;
  static F32Bits From(float value) { return {value}; }
};

}  // namespace

const float* QuantileTable() {
  static const std::array<float, kQuantiles> table = MakeQuantiles();
  return table.data();
}

absl::StatusOr<Generator> Generator::For(const quern::v1::GenerateUnit& unit) {
  const quern::v1::OutputTensor& output = unit.output();
  Generator generator;
  QUERN_ASSIGN_OR_RETURN(generator.dtype_, ParseDType(output.dtype()));
  if (unit.distribution() == "normal") {
    generator.kind_ = Kind::kNormal;
  } else if (unit.distribution() == "ones") {
    generator.kind_ = Kind::kOnes;
  } else if (unit.distribution() == "zeros") {
    generator.kind_ = Kind::kZeros;
  } else {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", output.name(), ": unknown distribution \"", unit.distribution(), "\""));
  }
  if (generator.dtype_ != DType::kBF16 && generator.dtype_ != DType::kF16 && generator.dtype_ != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", output.name(), ": cannot generate ", output.dtype()));
  }
  uint64_t size = static_cast<uint64_t>(BytesPerElement(generator.dtype_));
  for (const uint64_t dimension : output.shape()) {
    if (__builtin_mul_overflow(size, dimension, &size)) size = UINT64_MAX;
  }
  if (size != output.size()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", output.name(), ": ", output.size(), " bytes do not fit its shape"));
  }
  generator.key_ = Mix(unit.seed() ^ Mix(Xxh3Of(output.name().data(), output.name().size())));
  generator.deviation_ = static_cast<float>(unit.standard_deviation());
  generator.cols_ = output.shape().empty() ? 1 : std::max<uint64_t>(output.shape(output.shape_size() - 1), 1);
  return generator;
}

float Generator::ValueAt(uint64_t i) const {
  if (kind_ != Kind::kNormal) return kind_ == Kind::kOnes ? 1.0f : 0.0f;
  const uint64_t h = Mix(key_ + (i / 4 + 1) * kGolden);
  float z = QuantileTable()[(h >> (13 * (i % 4))) & (kQuantiles - 1)];
  if (i % 4 == 0 && (h >> 52) == 0) z = 16 * z;
  return z * ChannelScale(i / cols_);
}

template <typename Out>
void Generator::FillAs(uint64_t first, uint64_t count, std::byte* out) const {
  const auto put = [&](uint64_t i, Out value) { memcpy(out + (i - first) * sizeof(Out), &value, sizeof(Out)); };
  const uint64_t end = first + count;
  if (kind_ != Kind::kNormal) {
    const Out value = Out::From(kind_ == Kind::kOnes ? 1.0f : 0.0f);
    for (uint64_t i = first; i < end; ++i) put(i, value);
    return;
  }
  const float* const table = QuantileTable();
  uint64_t i = first;
  while (i < end) {
    const uint64_t channel = i / cols_;
    const uint64_t channel_end = std::min(end, (channel + 1) * cols_);
    const float scale = ChannelScale(channel);
    for (; i < channel_end && i % 4 != 0; ++i) put(i, Out::From(ValueAt(i)));
    // Look-ups first, then products and rounding, which compilers vectorize.
    constexpr uint64_t kBlock = 64;
    for (; i + kBlock <= channel_end; i += kBlock) {
      float z[kBlock];
      for (uint64_t j = 0; j < kBlock; j += 4) {
        const uint64_t h = Mix(key_ + ((i + j) / 4 + 1) * kGolden);
        z[j] = ((h >> 52) == 0 ? 16.0f : 1.0f) * table[h & (kQuantiles - 1)];
        z[j + 1] = table[(h >> 13) & (kQuantiles - 1)];
        z[j + 2] = table[(h >> 26) & (kQuantiles - 1)];
        z[j + 3] = table[(h >> 39) & (kQuantiles - 1)];
      }
      Out values[kBlock];
      for (uint64_t j = 0; j < kBlock; ++j) values[j] = Out::From(z[j] * scale);
      memcpy(out + (i - first) * sizeof(Out), values, sizeof values);
    }
    for (; i < channel_end; ++i) put(i, Out::From(ValueAt(i)));
  }
}

void Generator::Fill(uint64_t first, uint64_t count, std::byte* out) const {
  if (dtype_ == DType::kF32) {
    FillAs<F32Bits>(first, count, out);
  } else if (dtype_ == DType::kF16) {
    FillAs<F16Bits>(first, count, out);
  } else {
    FillAs<BF16Bits>(first, count, out);
  }
}

}  // namespace quern::worker
