#include "worker/io/buffer_pool.h"

#include <string.h>

#include <random>
#include <vector>

#include "base/byte_size.h"
#include "base/status_matchers.h"
#include "base/task_memory.h"

namespace quern::worker {
namespace {

class BufferRingTest : public testing::Test {
 protected:
  alignas(kIoBlock) std::byte memory_[8 * kIoBlock];
  BufferRing ring_{memory_, sizeof memory_};

  std::optional<PoolBuffer> Acquire(uint64_t blocks) { return ring_.Acquire(blocks * kIoBlock, absl::ZeroDuration()); }
};

TEST_F(BufferRingTest, PartsFollowEachOther) {
  const std::optional<PoolBuffer> a = Acquire(3), b = ring_.Acquire(1, absl::ZeroDuration()), c = Acquire(4);
  ASSERT_TRUE(a && b && c);
  EXPECT_EQ(a->data(), memory_);
  EXPECT_EQ(b->data(), memory_ + 3 * kIoBlock);
  EXPECT_EQ(b->size(), kIoBlock);
  EXPECT_EQ(c->data(), memory_ + 4 * kIoBlock);
  EXPECT_FALSE(ring_.Acquire(1, absl::Milliseconds(1)).has_value());
}

TEST_F(BufferRingTest, ReturnedPartsAreReusedInOrder) {
  std::optional<PoolBuffer> a = Acquire(4), b = Acquire(4);
  b.reset();
  EXPECT_FALSE(Acquire(1)) << "the older part is still out";
  a.reset();
  EXPECT_TRUE(Acquire(8));
}

TEST_F(BufferRingTest, APartIsNeverSplitAtTheEnd) {
  std::optional<PoolBuffer> a = Acquire(3), b = Acquire(3);
  a.reset();
  std::optional<PoolBuffer> c = Acquire(3);
  ASSERT_TRUE(c);
  EXPECT_EQ(c->data(), memory_);
  EXPECT_FALSE(Acquire(1)) << "[3, 6) is in use, and what is behind it comes before [0, 3) in the order of parts";
  b.reset();
  EXPECT_TRUE(Acquire(5));
}

TEST_F(BufferRingTest, RandomRequestsNeverOverlap) {
  std::mt19937 random(7);
  std::vector<PoolBuffer> out;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      if (std::optional<PoolBuffer> part = Acquire(1 + random() % 8)) {
        for (const PoolBuffer& other : out) {
          ASSERT_TRUE(part->data() + part->size() <= other.data() || other.data() + other.size() <= part->data());
        }
        ASSERT_LE(part->data() + part->size(), memory_ + sizeof memory_);
        out.push_back(*std::move(part));
      }
    } else if (!out.empty()) {
      const size_t victim = random() % out.size();
      out[victim] = std::move(out.back());
      out.pop_back();
    }
  }
  out.clear();
  EXPECT_TRUE(Acquire(8));
}

TEST(PoolLayoutTest, NeverExceedsTheBudget) {
  for (uint64_t memory = kMinimumTaskMemory; memory < 8 * kGiB; memory += memory / 7 + 12345) {
    for (int bits = 0; bits < 8; ++bits) {
      const PoolLayout::Needs needs{.output = (bits & 1) != 0, .slabs = (bits & 2) != 0, .sets = (bits & 4) != 0};
      const PoolLayout layout = PoolLayout::For(memory, needs);
      EXPECT_LE(layout.total(), memory);
      EXPECT_GE(layout.total(), std::min(memory * 7 / 8, 64 * kMiB));
      for (const uint64_t part : {layout.input, layout.held, layout.slabs, layout.sets}) EXPECT_EQ(part % kIoBlock, 0);
      EXPECT_EQ(layout.slabs >= memory / 8, needs.slabs);
      EXPECT_EQ(layout.sets >= memory / 8, needs.sets);
      if (!needs.output) continue;
      EXPECT_EQ(layout.output % layout.chunk, 0);
      EXPECT_GE(layout.output, 16 * layout.chunk);
      EXPECT_GE(layout.window, layout.chunk);
    }
  }
}

TEST(PoolLayoutTest, TheLeastPoolHoldsTheTileThatItIsFor) {
  for (uint64_t tile = 1000; tile < 4 * kGiB; tile += tile / 3 + 12345) {
    const uint64_t minimum = TileMemory(tile);
    for (const uint64_t memory : {minimum, minimum + kMiB, 3 * minimum, minimum + 4 * kGiB}) {
      for (int bits = 0; bits < 8; ++bits) {
        const PoolLayout::Needs needs{.output = (bits & 1) != 0, .slabs = (bits & 2) != 0, .sets = (bits & 4) != 0, .minimum = minimum};
        const PoolLayout layout = PoolLayout::For(memory, needs);
        EXPECT_LE(layout.total(), memory);
        EXPECT_GE(layout.input / 4, tile) << memory;
        if (needs.output) EXPECT_GE(layout.window, tile / 2) << memory;
        if (needs.slabs) EXPECT_GE(layout.slabs, tile) << memory;
      }
    }
  }
}

TEST(BufferPoolTest, WindowGoesOnBehindTheEndOfTheOutput) {
  const PoolLayout layout = PoolLayout::For(kMinimumTaskMemory, {.output = true});
  QUERN_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<BufferPool> pool, BufferPool::Create(layout));
  memset(pool->output() + layout.output - 10, 'x', 20);
  EXPECT_EQ(memcmp(pool->output(), "xxxxxxxxxx", 10), 0);
  EXPECT_EQ(pool->output()[10], std::byte{0});
  pool->output()[layout.window - 1] = std::byte{7};
  EXPECT_EQ(pool->output()[layout.output + layout.window - 1], std::byte{7});
  memset(pool->input(), 1, layout.input);
  memset(pool->held(), 2, layout.held);
  EXPECT_EQ(pool->output()[layout.window - 1], std::byte{7});
}

}  // namespace
}  // namespace quern::worker
