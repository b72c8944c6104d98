// Support of the quant tests: whole weights through the scheme interface in any division into tiles.
#ifndef QUERN_QUANT_TEST_WEIGHT_H_
#define QUERN_QUANT_TEST_WEIGHT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "quant/scheme.h"

namespace quern::quant {

struct TestWeight {
  DType dtype = DType::kBF16;
  Shape2D shape;
  std::string bytes;  // dense, row by row
};

// How a weight is divided: bands of `band_rows` rows (a multiple of 32), or, with `segment_columns` > 0, segments of single rows.
struct Tiling {
  int64_t band_rows = 32;
  int64_t segment_columns = 0;
  // Threads that take bands (or rows of segments) in an order drawn from `order`; 0: in order, by the calling thread.
  int threads = 0;
  uint64_t order = 0;
};

struct EncodedWeight {
  std::vector<Region> regions;
  std::vector<std::string> data;  // one a region
  std::vector<RowError> errors;   // one a row
};

// Regions' buffers over whole regions.
std::vector<RegionBuffer> BuffersOf(EncodedWeight& encoded);

// Encodes all tiles, with the statistics pass where the scheme needs it. `others` are the other weights of its set.
absl::StatusOr<EncodedWeight> EncodeWeight(const Scheme& scheme, const TestWeight& weight, const Tiling& tiling,
                                           NonfinitePolicy nonfinite = NonfinitePolicy::kFail, const ModuleInputs& inputs = ModuleInputs(),
                                           absl::Span<const TestWeight> others = {});
// Decodes all tiles; the bytes are laid out as the weight's.
absl::StatusOr<std::string> DecodeWeight(const Scheme& scheme, const TestWeight& weight, EncodedWeight& encoded, const Tiling& tiling);

// Seeded bell-shaped values whose rows differ by up to 12 powers of two; with `unusual` also outliers, zeros of both signs, groups of zeros
// and rows of subnormals. Exact integer arithmetic, so that every machine makes the same.
TestWeight RandomWeight(DType dtype, Shape2D shape, uint64_t seed, bool unusual = true);

// SHA-256 over the regions and the raw error figures, in hexadecimal.
std::string DigestOf(const EncodedWeight& encoded);

// Equal bit for bit.
bool SameErrors(const std::vector<RowError>& a, const std::vector<RowError>& b);

}  // namespace quern::quant

#endif  // QUERN_QUANT_TEST_WEIGHT_H_
