#include "quant/block_sample.h"

#include <algorithm>
#include <cstring>

namespace quern::quant {
namespace {

constexpr int64_t kBlockColumns = 16;
// Blocks times candidates for the global scale: how long the search takes.
constexpr int64_t kTrials = 16 * kSampledBlocks;
constexpr int64_t kLeastCandidates = 16, kMostCandidates = 1024;
// So many blocks are tried with all that nvfp4_expanded_mse could come to.
constexpr int64_t kFewBlocks = 8;

size_t BlockBytes(ElementType element) { return static_cast<size_t>(kBlockColumns) * (element == ElementType::kF32 ? 4 : 2); }

// Sampled blocks of one element type.
struct Part {
  ElementType element;
  std::vector<unsigned char> elements{};
  std::vector<float> amax{}, errors{};
  std::vector<double> weights{};  // what an error of 1 counts
};

}  // namespace

bool BlockSample::Before(const Block& a, const Block& b) {
  if (a.priority != b.priority) return a.priority > b.priority;
  if (a.element != b.element) return a.element < b.element;
  return std::memcmp(a.elements, b.elements, sizeof a.elements) < 0;
}

void BlockSample::Observe(const FloatTile& tile, int64_t row, int64_t block, float* amax) {
  constexpr int64_t kPart = 256;  // blocks
  const auto bytes = static_cast<int64_t>(BlockBytes(tile.element));
  const int64_t blocks = tile.columns / kBlockColumns;
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t begin = 0; begin < blocks; begin += kPart) {
      FloatTile part = tile;
      part.rows = 1;
      part.columns = std::min(kPart, blocks - begin) * kBlockColumns;
      part.elements += r * tile.element_stride + begin * bytes;
      float largest[kPart] = {};
      ObserveAmax(part, largest, 0);
      for (int64_t i = 0; i < part.columns / kBlockColumns; ++i) {
        if (largest[i] == 0) continue;
        *amax = std::max(*amax, largest[i]);
        Add(largest[i], row + r, block + begin + i, tile.element, part.elements + i * bytes);
      }
    }
  }
}

void BlockSample::Add(float amax, int64_t row, int64_t block, ElementType element, const unsigned char* elements) {
  const double priority = scalar::BlockPriority(scalar::BlockWeight(amax), scalar::BlockHash(row, block));
  if (priority < threshold_) return;
  if (blocks_.size() == kSampledBlocks * 3 / 2 + 1) Shrink();
  Block& added = blocks_.emplace_back();
  added.priority = priority;
  added.amax = amax;
  added.element = element;
  std::memcpy(added.elements, elements, BlockBytes(element));
}

void BlockSample::Shrink() {
  if (blocks_.size() <= kSampledBlocks + 1) return;
  std::nth_element(blocks_.begin(), blocks_.begin() + kSampledBlocks, blocks_.end(), Before);
  threshold_ = blocks_[kSampledBlocks].priority;
  blocks_.resize(kSampledBlocks + 1);
}

void BlockSample::Merge(const BlockSample& other) {
  threshold_ = std::max(threshold_, other.threshold_);
  blocks_.insert(blocks_.end(), other.blocks_.begin(), other.blocks_.end());
  Shrink();
}

float BlockSample::BestGlobalScale(const scalar::FloatFormat& format, float amax) const {
  if (blocks_.empty()) return 0;
  std::vector<Block> sorted = blocks_;
  std::sort(sorted.begin(), sorted.end(), Before);
  double left_out = 0;
  if (sorted.size() > kSampledBlocks) {
    left_out = sorted[kSampledBlocks].priority;
    sorted.resize(kSampledBlocks);
  }
  std::vector<float> candidates;
  const auto count = static_cast<int64_t>(sorted.size());
  const int steps = static_cast<int>(std::clamp(kTrials / count, kLeastCandidates, kMostCandidates));
  for (int i = 0; i < steps; ++i) candidates.push_back(scalar::CandidateGlobalScale(amax, i, steps));
  Part parts[] = {{ElementType::kBf16}, {ElementType::kF16}, {ElementType::kF32}};
  for (const Block& block : sorted) {
    for (Part& part : parts) {
      if (part.element != block.element) continue;
      part.elements.insert(part.elements.end(), block.elements, block.elements + BlockBytes(block.element));
      part.amax.push_back(block.amax);
      part.weights.push_back(std::max(scalar::BlockWeight(block.amax), left_out));
    }
    if (count > kFewBlocks) continue;
    WithFormat(block.element, [&](auto d) {
      using D = decltype(d);
      for (int step = 0; step < scalar::kExpandedSteps; ++step) {
        candidates.push_back(scalar::Nvfp4GlobalScale<D>(scalar::ExpandedAmax<D>(block.amax, step, format.precise), format.precise));
      }
    });
  }
  for (Part& part : parts) part.errors.resize(part.amax.size());

  float best = 0;
  double least = static_cast<double>(scalar::FloatOf(0x7F800000));
  for (const float candidate : candidates) {
    // Not 0, infinite, or a subnormal number, which some GPUs take for 0.
    if (!(candidate >= 0x1p-126f && candidate <= scalar::F32::kLargest)) continue;
    double total = 0;
    for (Part& part : parts) {
      if (part.amax.empty()) continue;
      FloatTile tile;
      tile.format = format;
      tile.element = part.element;
      tile.rows = 1;
      tile.columns = static_cast<int64_t>(part.amax.size()) * kBlockColumns;
      tile.group = kBlockColumns;
      tile.set_scale = candidate;
      tile.elements = part.elements.data();
      tile.element_stride = static_cast<int64_t>(part.elements.size());
      LeastErrors(tile, part.amax.data(), part.errors.data());
      for (size_t i = 0; i < part.errors.size(); ++i) total += static_cast<double>(part.errors[i]) * part.weights[i];
    }
    if (total < least) {
      least = total;
      best = candidate;
    }
  }
  return best;
}

}  // namespace quern::quant
