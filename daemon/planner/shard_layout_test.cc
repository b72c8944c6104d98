#include "daemon/planner/shard_layout.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "checkpoint/safetensors.h"

namespace quern::daemon {
namespace {

using checkpoint::ModuleIdentity;
using checkpoint::Role;
using ::testing::ElementsAre;

constexpr uint64_t kHeader = 4096;

LayoutBlock Layer(uint32_t layer, std::string key, uint64_t bytes, uint64_t tensors = 1) {
  return {{Phase::kLayer, layer}, std::move(key), bytes, tensors, 100 * tensors};
}

TEST(ShardLayout, LayersStayTogether) {
  const std::vector<LayoutBlock> blocks = {Layer(1, "a", 600),
                                           Layer(0, "b", 300),
                                           Layer(0, "a", 300),
                                           {{Phase::kAfterLayers, 0}, "z", 100, 1, 100},
                                           {{Phase::kBeforeLayers, 0}, "e", 100, 1, 100}};
  EXPECT_THAT(LayOutShards(blocks, kHeader + 1000), ElementsAre(ElementsAre(4, 2, 1), ElementsAre(0, 3)));
  EXPECT_THAT(LayOutShards(blocks, kHeader + 10000), ElementsAre(ElementsAre(4, 2, 1, 0, 3)));
}

TEST(ShardLayout, LargerLayerIsCutBetweenBlocks) {
  const std::vector<LayoutBlock> blocks = {Layer(0, "a", 400), Layer(0, "b", 400), Layer(0, "c", 400), Layer(1, "a", 500)};
  EXPECT_THAT(LayOutShards(blocks, kHeader + 1000), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)));
}

TEST(ShardLayout, LargerBlockHasItsOwnShard) {
  const std::vector<LayoutBlock> blocks = {Layer(0, "a", 10), Layer(0, "b", 5000), Layer(0, "c", 10)};
  EXPECT_THAT(LayOutShards(blocks, kHeader + 1000), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
}

TEST(ShardLayout, NumberOfTensorsIsBounded) {
  const std::vector<LayoutBlock> blocks = {Layer(0, "a", 1, 8000), Layer(0, "b", 1, 192), Layer(0, "c", 1, 1)};
  EXPECT_THAT(LayOutShards(blocks, uint64_t{1} << 40), ElementsAre(ElementsAre(0, 1), ElementsAre(2)));
}

TEST(ShardLayout, HeadersCount) {
  const std::vector<LayoutBlock> blocks = {Layer(0, "a", 10, 40), Layer(0, "b", 10, 40)};  // 4000 bytes of header each
  EXPECT_THAT(LayOutShards(blocks, kHeader + 100), ElementsAre(ElementsAre(0), ElementsAre(1)));
  EXPECT_THAT(LayOutShards(blocks, 2 * kHeader + 100), ElementsAre(ElementsAre(0, 1)));
}

TEST(ShardLayout, NothingGivesNoShard) { EXPECT_TRUE(LayOutShards({}, 100).empty()); }

TEST(ShardLayout, EntryBoundHolds) {
  for (const std::string& name :
       {std::string("a"), std::string("model.layers.10.self_attn.q_proj.weight"), std::string("q\"\\\x01 \xc3\xa9")}) {
    for (size_t dimensions = 0; dimensions < 6; ++dimensions) {
      checkpoint::TensorInfo info{name, DType::kF8E4M3Fnuz, std::vector<uint64_t>(dimensions, 1), uint64_t{1} << 62,
                                  (uint64_t{1} << 62) + 1};
      std::vector<checkpoint::TensorInfo> many(200, info);
      const size_t size = checkpoint::BuildSafetensorsHeader(many).size();
      EXPECT_LE(size, 64 + 200 * HeaderEntryBound(name, dimensions) + 4096) << name;
    }
  }
}

TEST(ShardLayout, Names) {
  EXPECT_EQ(ShardName(0, 1), "model.safetensors");
  EXPECT_EQ(ShardName(2, 12), "model-00003-of-00012.safetensors");
}

TEST(ShardLayout, Places) {
  checkpoint::ModelConfig config;
  config.num_hidden_layers = 4;
  ModuleIdentity identity;
  identity.role = Role::kEmbeddings;
  EXPECT_EQ(PlaceOf(identity, config), (Place{Phase::kBeforeLayers, 0}));
  identity.role = Role::kLmHead;
  EXPECT_EQ(PlaceOf(identity, config), (Place{Phase::kAfterLayers, 0}));
  identity.role = Role::kAttention;
  identity.layer = 3;
  EXPECT_EQ(PlaceOf(identity, config), (Place{Phase::kLayer, 3}));
  identity.role = Role::kMtp;
  EXPECT_EQ(PlaceOf(identity, config), (Place{Phase::kAfterLayers, 0})) << "a numbering of its own";
  identity.layer = 4;
  EXPECT_EQ(PlaceOf(identity, config), (Place{Phase::kLayer, 4}));
}

}  // namespace
}  // namespace quern::daemon
