// Seeded weights of synthetic checkpoints. The value of element i depends only on (seed, name, shape, i), so any part of a tensor can be
// made by itself.
//
// Definition of "normal". Let `mix` be the finalizer below, `name_hash` = XXH3-64 of the tensor's name, key = mix(seed ^ mix(name_hash)),
// and `cols` the last dimension (the whole tensor when it has one dimension). A channel is a row of `cols` elements.
//
//   h     = mix(key + (i / 4 + 1) * kGolden)              one word for four elements
//   q     = bits [13 * (i % 4), 13 * (i % 4) + 13) of h   index of a quantile
//   z     = Quantile(q), of the standard normal distribution at (q + 1/2) / 8192
//   z     = 16 * z  where i % 4 == 0 and the upper 12 bits of h are 0: outliers, one in 16384
//   u     = mix(~key + (i / cols + 1) * kGolden) >> 40    24 bits
//   scale = f32(standard_deviation) * (0.5f + u * 2^-24f) of the channel
//   value = z * scale, rounded to nearest even into the dtype
//
// Products are f32, each rounded once. "ones" and "zeros" are what they say. Do not change: synthetic checkpoints are named by their seed.
#ifndef QUERN_WORKER_PIPELINE_GENERATE_H_
#define QUERN_WORKER_PIPELINE_GENERATE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "quern/v1/plan.pb.h"

namespace quern::worker {

inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
inline constexpr int kQuantiles = 8192;

// The finalizer of SplitMix64.
inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// kQuantiles values, the same on every machine: made from +, -, * and / of doubles alone, rounded to f32.
const float* QuantileTable();

// Immutable and thread-safe.
class Generator {
 public:
  // INVALID_ARGUMENT for a distribution or dtype that it does not know, or a size that does not fit the shape.
  static absl::StatusOr<Generator> For(const quern::v1::GenerateUnit& unit);

  // Bytes of one element.
  int element_size() const { return BytesPerElement(dtype_); }
  // Writes elements [first, first + count), at any address.
  void Fill(uint64_t first, uint64_t count, std::byte* out) const;
  // The definition, before rounding to the dtype.
  float ValueAt(uint64_t i) const;

 private:
  enum class Kind { kNormal, kOnes, kZeros };
  Generator() = default;
  float ChannelScale(uint64_t channel) const {
    const auto u = static_cast<float>(Mix(~key_ + (channel + 1) * kGolden) >> 40);
    return deviation_ * (0.5f + u * 0x1p-24f);
  }
  template <typename Out>
  void FillAs(uint64_t first, uint64_t count, std::byte* out) const;

  Kind kind_ = Kind::kZeros;
  DType dtype_ = DType::kBF16;
  uint64_t key_ = 0;
  uint64_t cols_ = 1;
  float deviation_ = 0;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_GENERATE_H_
