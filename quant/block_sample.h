// The global scale of NVFP4 under the observer MSE: a sample of a set's blocks, and the scale that is best for them.
//
// A sample holds the kSampledBlocks blocks of the highest priority (scalar/float_search.h), whatever the order in which they came and were
// merged: large blocks, which make up most of the error, are likely to be in it, and a set with fewer blocks is in it as a whole.
#ifndef QUERN_QUANT_BLOCK_SAMPLE_H_
#define QUERN_QUANT_BLOCK_SAMPLE_H_

#include <cstdint>
#include <vector>

#include "quant/kernels/float_tile.h"

namespace quern::quant {

inline constexpr size_t kSampledBlocks = 1024;

class BlockSample {
 public:
  // Adds the blocks of a tile of NVFP4 (its group is 16) whose first block is at (row, block) of its weight, and extends `amax` by their
  // largest magnitude. Of each of the set's weights every block is added once.
  void Observe(const FloatTile& tile, int64_t row, int64_t block, float* amax);
  void Merge(const BlockSample& other);

  // The best global scale of the candidates for a set whose largest magnitude is `amax`; 0 where there is no block but of zeros.
  float BestGlobalScale(const scalar::FloatFormat& format, float amax) const;

 private:
  struct Block {
    double priority;
    float amax;
    ElementType element;
    unsigned char elements[64];  // the rest is zero
  };
  // A total order: blocks that are equal in it are equal.
  static bool Before(const Block& a, const Block& b);
  void Add(float amax, int64_t row, int64_t block, ElementType element, const unsigned char* elements);
  // Drops what cannot be in the sample any more.
  void Shrink();

  // At most half as many again as are sampled, and one more: the highest priority that is left out is needed, too.
  std::vector<Block> blocks_;
  double threshold_ = 0;  // blocks of a lower priority are left out
};

}  // namespace quern::quant

#endif  // QUERN_QUANT_BLOCK_SAMPLE_H_
