#include "checkpoint/checkpoint.h"

#include <stdlib.h>
#include <unistd.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/test_files.h"

namespace quern::checkpoint {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::IsNull;
using testing::Not;
using testing::NotNull;
using testing::Pair;

constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr absl::string_view kConfig = R"({"model_type": "llama", "num_hidden_layers": 1})";

// Two shards, "a" in the first, "b" and "c" in the second, without an index.
void WriteTwoShards(const TestDirectory& directory) {
  QUERN_ASSERT_OK(directory.Write("config.json", kConfig));
  QUERN_ASSERT_OK(directory.Write("x.safetensors", MakeSafetensors({{"a", DType::kBF16, {2, 2}}})));
  QUERN_ASSERT_OK(directory.Write("y.safetensors", MakeSafetensors({{"c", DType::kBF16, {2}}, {"b", DType::kBF16, {2}}})));
}

absl::Status WriteIndex(const TestDirectory& directory, absl::string_view weight_map) {
  return directory.Write("model.safetensors.index.json",
                         absl::StrCat(R"({"metadata": {"total_size": 1}, "weight_map": )", weight_map, "}"));
}

// Sets or unsets an environment variable for the life of the object.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value) : name_(name) {
    if (const char* old = getenv(name)) old_ = old;
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
  }
  ~ScopedEnvironment() { old_ ? setenv(name_, old_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST(CheckpointTest, OpensTheTrainedLaguna) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open("tests/data/laguna-micro"));
  EXPECT_EQ(checkpoint.directory()[0], '/');
  EXPECT_EQ(checkpoint.config().model_type, "laguna");
  ASSERT_EQ(checkpoint.shards().size(), 3u);
  EXPECT_EQ(checkpoint.shards()[1].name, "model-00002-of-00003.safetensors");
  EXPECT_EQ(checkpoint.shards()[1].size, 1982560u);
  EXPECT_EQ(checkpoint.tensors().size(), checkpoint.index().weight_map.size());
  EXPECT_THAT(checkpoint.side_files(), ElementsAre("generation_config.json", "tokenizer.json", "tokenizer_config.json"));
  EXPECT_THAT(checkpoint.skipped_files(), ElementsAre(Pair("model.safetensors.index.json", "index, written anew")));
  const TensorLocation* location = checkpoint.Find("model.layers.1.mlp.gate.weight");
  ASSERT_THAT(location, NotNull());
  EXPECT_THAT(location->info->shape, ElementsAre(8, 128));
  EXPECT_THAT(checkpoint.Find("model.layers.9.mlp.gate.weight"), IsNull());
}

TEST(CheckpointTest, TensorsStandInTheOrderOfShardsAndOffsets) {
  TestDirectory directory;
  WriteTwoShards(directory);
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"})"));
  QUERN_ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(directory.path() + "/"));
  EXPECT_EQ(checkpoint.directory(), directory.path());
  const Checkpoint moved = std::move(checkpoint);
  std::vector<std::string> names;
  for (const TensorLocation& location : moved.tensors()) names.push_back(location.info->name);
  EXPECT_THAT(names, ElementsAre("a", "c", "b"));
  EXPECT_EQ(moved.Find("b")->shard, 1u);
}

TEST(CheckpointTest, SingleFileNeedsNoIndex) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("config.json", kConfig));
  QUERN_ASSERT_OK(directory.Write("weights.safetensors", MakeSafetensors({{"a", DType::kBF16, {2}}})));
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint other_name, Checkpoint::Open(directory.path()));
  EXPECT_EQ(other_name.shards()[0].name, "weights.safetensors");
  EXPECT_THAT(other_name.index().weight_map, IsEmpty());
  QUERN_ASSERT_OK(directory.Write("model.safetensors", MakeSafetensors({{"b", DType::kBF16, {2}}})));
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint usual_name, Checkpoint::Open(directory.path()));
  ASSERT_EQ(usual_name.shards().size(), 1u);
  EXPECT_EQ(usual_name.shards()[0].name, "model.safetensors");
  EXPECT_THAT(usual_name.skipped_files(), ElementsAre(Pair("weights.safetensors", HasSubstr("not the shard"))));
}

TEST(CheckpointTest, WhatIsNoCheckpointIsSaidSo) {
  TestDirectory directory;
  EXPECT_THAT(Checkpoint::Open(directory.path()), StatusIs(kNotFound, HasSubstr("holds no config.json")));
  QUERN_ASSERT_OK(directory.Write("config.json", kConfig));
  EXPECT_THAT(Checkpoint::Open(directory.path()), StatusIs(kNotFound, HasSubstr("model.safetensors.index.json")));
  WriteTwoShards(directory);
  EXPECT_THAT(Checkpoint::Open(directory.path()), StatusIs(kNotFound, HasSubstr("exactly one")));
  EXPECT_THAT(Checkpoint::Open(directory.Path("nowhere")), StatusIs(kNotFound));
}

// "index names a missing shard, or a tensor that its shard lacks": preflight error listing every missing file and tensor
TEST(CheckpointCases, EveryMissingFileAndTensorIsListed) {
  TestDirectory directory;
  WriteTwoShards(directory);
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "x.safetensors", "b": "x.safetensors", "d": "y.safetensors", "e": "m1.safetensors",
                                            "f": "m2.safetensors", "g": "m2.safetensors"})"));
  EXPECT_THAT(
      Checkpoint::Open(directory.path()),
      StatusIs(kInvalid, AllOf(HasSubstr("4 problems"), HasSubstr("missing file m1.safetensors"), HasSubstr("missing file m2.safetensors"),
                               HasSubstr("tensor \"b\" is not in x.safetensors"), HasSubstr("tensor \"d\" is not in y.safetensors"))));
}

TEST(CheckpointCases, BadShardsAreListedTogether) {
  TestDirectory directory;
  WriteTwoShards(directory);
  QUERN_ASSERT_OK(directory.Write("x.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"));
  QUERN_ASSERT_OK(directory.Write("y.safetensors", "short"));
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "x.safetensors", "b": "y.safetensors"})"));
  EXPECT_THAT(Checkpoint::Open(directory.path()),
              StatusIs(kInvalid,
                       AllOf(HasSubstr("2 problems"), HasSubstr("x.safetensors: this is a Git-LFS pointer"), HasSubstr("y.safetensors"))));
}

TEST(CheckpointTest, ATensorInTwoShardsIsRefused) {
  TestDirectory directory;
  WriteTwoShards(directory);
  QUERN_ASSERT_OK(directory.Write("x.safetensors", MakeSafetensors({{"a", DType::kBF16, {2}}, {"b", DType::kBF16, {2}}})));
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "x.safetensors", "b": "y.safetensors"})"));
  EXPECT_THAT(Checkpoint::Open(directory.path()),
              StatusIs(kInvalid, HasSubstr("tensor \"b\" stands in both x.safetensors and y.safetensors")));
}

TEST(CheckpointTest, IndexThatLeadsOutOfTheDirectoryIsRefused) {
  TestDirectory directory;
  WriteTwoShards(directory);
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "../x.safetensors"})"));
  EXPECT_THAT(Checkpoint::Open(directory.path()), StatusIs(kInvalid, HasSubstr("../x.safetensors")));
}

TEST(CheckpointTest, TensorsOfAShardThatTheIndexForgotAreThere) {
  TestDirectory directory;
  WriteTwoShards(directory);
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "x.safetensors", "b": "y.safetensors"})"));
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(directory.path()));
  EXPECT_THAT(checkpoint.Find("c"), NotNull());
}

// "directory with generation_config, chat_template.jinja, processor, custom .py, stale index, hf_quant_config.json"
TEST(CheckpointCases, SmallFilesAreCopiedAndStaleOnesAreNot) {
  TestDirectory directory;
  WriteTwoShards(directory);
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "x.safetensors"})"));
  const std::vector<std::string> copied = {"LICENSE.txt",
                                           "README.md",
                                           "USE_POLICY.md",
                                           "additional_chat_templates/rag.jinja",
                                           "chat_template.jinja",
                                           "generation_config.json",
                                           "modeling_custom.py",
                                           "preprocessor_config.json",
                                           "processor_config.json",
                                           "qwen.tiktoken",
                                           "tekken.json",
                                           "tokenizer.model",
                                           "video_preprocessor_config.json"};
  const std::vector<std::string> left = {"pytorch_model.bin",
                                         "pytorch_model.bin.index.json",
                                         "hf_quant_config.json",
                                         "quantize_config.json",
                                         "recipe.yaml",
                                         "consolidated.safetensors",
                                         "model.gguf",
                                         "adapter_model.safetensors",
                                         "original/params.json",
                                         ".gitattributes",
                                         "figure.png"};
  for (const std::string& name : copied) QUERN_ASSERT_OK(directory.Write(name, "small"));
  for (const std::string& name : left) QUERN_ASSERT_OK(directory.Write(name, "small"));
  ASSERT_EQ(symlink("nowhere", directory.Path("vocab.json").c_str()), 0);
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(directory.path()));
  EXPECT_EQ(checkpoint.side_files(), copied);
  std::vector<std::string> skipped;
  for (const auto& [name, reason] : checkpoint.skipped_files()) {
    EXPECT_THAT(reason, Not(IsEmpty())) << name;
    skipped.push_back(name);
  }
  EXPECT_THAT(skipped, testing::UnorderedElementsAre("pytorch_model.bin", "pytorch_model.bin.index.json", "hf_quant_config.json",
                                                     "quantize_config.json", "recipe.yaml", "consolidated.safetensors", "model.gguf",
                                                     "adapter_model.safetensors", "original", ".gitattributes", "figure.png", "vocab.json",
                                                     "y.safetensors", "model.safetensors.index.json"));
  EXPECT_THAT(checkpoint.skipped_files(), Contains(Pair("y.safetensors", HasSubstr("not named by model.safetensors.index.json"))));
}

TEST(CheckpointCases, NamesThatAreNoUtf8AreRefusedOrLeftBehind) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("config.json", kConfig));
  QUERN_ASSERT_OK(directory.Write("model.safetensors", MakeSafetensors({{"a", DType::kBF16, {2}}})));
  QUERN_ASSERT_OK(directory.Write("notes-\xFF", "x"));
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(directory.path()));
  EXPECT_THAT(checkpoint.skipped_files(), ElementsAre(Pair("notes-\\xff", HasSubstr("not a file"))));
  QUERN_ASSERT_OK(directory.Write("LICENSE-\xFF", "x"));
  EXPECT_THAT(Checkpoint::Open(directory.path()), StatusIs(kInvalid, AllOf(HasSubstr("LICENSE-\\xff"), HasSubstr("rename"))));
}

TEST(CheckpointCases, AShardOrADirectoryWhoseNameIsNoUtf8IsRefused) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("config.json", kConfig));
  QUERN_ASSERT_OK(directory.Write("w\xFF.safetensors", MakeSafetensors({{"a", DType::kBF16, {2}}})));
  EXPECT_THAT(Checkpoint::Open(directory.path()), StatusIs(kInvalid, HasSubstr("w\\xff.safetensors")));
  const std::string broken = directory.path() + "/sub\xFF";
  QUERN_ASSERT_OK(MakeDirectories(broken));
  EXPECT_THAT(Checkpoint::Open(broken), StatusIs(kInvalid, HasSubstr("sub\\xff")));
}

TEST(CheckpointCases, AnIndexThatNamesNothingThereIsStaleBesideASingleFile) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("config.json", kConfig));
  QUERN_ASSERT_OK(directory.Write("model.safetensors", MakeSafetensors({{"a", DType::kBF16, {2}}})));
  QUERN_ASSERT_OK(WriteIndex(directory, R"({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})"));
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(directory.path()));
  EXPECT_EQ(checkpoint.shards()[0].name, "model.safetensors");
  EXPECT_THAT(checkpoint.index().weight_map, IsEmpty());
  EXPECT_THAT(checkpoint.skipped_files(), ElementsAre(Pair("model.safetensors.index.json", HasSubstr("stale"))));
}

// A cache with one model, its snapshot "c0ffee" behind refs main and refs/pr/1.
class HuggingFaceCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    QUERN_ASSERT_OK(directory_.Write("hub/models--org--model/refs/main", "c0ffee\n"));
    QUERN_ASSERT_OK(directory_.Write("hub/models--org--model/refs/refs/pr/1", "c0ffee"));
    QUERN_ASSERT_OK(directory_.Write("hub/models--org--model/blobs/111", kConfig));
    QUERN_ASSERT_OK(directory_.Write("hub/models--org--model/blobs/222", MakeSafetensors({{"a", DType::kBF16, {2}}})));
    snapshot_ = directory_.Path("hub/models--org--model/snapshots/c0ffee");
    QUERN_ASSERT_OK(MakeDirectories(snapshot_));
    ASSERT_EQ(symlink("../../blobs/111", JoinPath(snapshot_, "config.json").c_str()), 0);
    ASSERT_EQ(symlink("../../blobs/222", JoinPath(snapshot_, "model.safetensors").c_str()), 0);
  }

  TestDirectory directory_;
  std::string snapshot_;
  ScopedEnvironment hub_cache_{"HF_HUB_CACHE", nullptr};
  ScopedEnvironment old_hub_cache_{"HUGGINGFACE_HUB_CACHE", nullptr};
  ScopedEnvironment home_{"HF_HOME", nullptr};
  ScopedEnvironment cache_{"XDG_CACHE_HOME", nullptr};
};

TEST_F(HuggingFaceCacheTest, NameAndRevisionLeadToTheSnapshot) {
  ScopedEnvironment home("HF_HOME", directory_.path().c_str());
  EXPECT_THAT(ResolveSource("org/model"), IsOkAndHolds(snapshot_));
  EXPECT_THAT(ResolveSource("org/model@main"), IsOkAndHolds(snapshot_));
  EXPECT_THAT(ResolveSource("org/model@refs/pr/1"), IsOkAndHolds(snapshot_));
  EXPECT_THAT(ResolveSource("org/model@c0ffee"), IsOkAndHolds(snapshot_));
}

TEST_F(HuggingFaceCacheTest, TheCacheIsFoundAsTheHubLibraryFindsIt) {
  {
    ScopedEnvironment hub("HF_HUB_CACHE", directory_.Path("hub").c_str());
    ScopedEnvironment home("HF_HOME", "/nowhere");
    EXPECT_THAT(ResolveSource("org/model"), IsOkAndHolds(snapshot_));
  }
  QUERN_ASSERT_OK(MakeDirectories(directory_.Path(".cache/huggingface")));
  ASSERT_EQ(symlink("../../hub", directory_.Path(".cache/huggingface/hub").c_str()), 0);
  ScopedEnvironment home("HOME", directory_.path().c_str());
  EXPECT_THAT(ResolveSource("org/model"), IsOkAndHolds(directory_.Path(".cache/huggingface/hub/models--org--model/snapshots/c0ffee")));
}

TEST_F(HuggingFaceCacheTest, ShardsAreOpenedThroughTheirLinks) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(snapshot_));
  ASSERT_EQ(checkpoint.shards().size(), 1u);
  EXPECT_EQ(checkpoint.shards()[0].name, "model.safetensors");
  EXPECT_EQ(checkpoint.shards()[0].path, JoinPath(snapshot_, "model.safetensors"));
}

TEST_F(HuggingFaceCacheTest, ALinkToNothingIsSaidToBeOne) {
  QUERN_ASSERT_OK(RemoveFile(directory_.Path("hub/models--org--model/blobs/222")));
  EXPECT_THAT(Checkpoint::Open(snapshot_), StatusIs(kInvalid, HasSubstr("model.safetensors is a link to a file that is not there")));
}

TEST_F(HuggingFaceCacheTest, WhatIsNotThereSaysWhereItLooked) {
  ScopedEnvironment home("HF_HOME", directory_.path().c_str());
  EXPECT_THAT(ResolveSource("org/other"), StatusIs(kNotFound, HasSubstr(directory_.Path("hub/models--org--other"))));
  EXPECT_THAT(ResolveSource("org/model@v2"), StatusIs(kNotFound, AllOf(HasSubstr("no revision v2"), HasSubstr("c0ffee"))));
  EXPECT_THAT(ResolveSource("a/b/c"), StatusIs(kNotFound, HasSubstr("no directory a/b/c")));
  EXPECT_THAT(ResolveSource(""), StatusIs(kInvalid));
  EXPECT_THAT(ResolveSource(JoinPath(snapshot_, "config.json")), StatusIs(kInvalid, HasSubstr("is a file")));
}

TEST_F(HuggingFaceCacheTest, RevisionsDoNotLeadOutOfTheCache) {
  ScopedEnvironment home("HF_HOME", directory_.path().c_str());
  EXPECT_THAT(ResolveSource("org/model@../../.."), StatusIs(kNotFound));
  EXPECT_THAT(ResolveSource("../hub@main"), StatusIs(kNotFound));
  QUERN_ASSERT_OK(directory_.Write("hub/models--org--model/refs/bad", "../../../secret"));
  EXPECT_THAT(ResolveSource("org/model@bad"), StatusIs(kInvalid, HasSubstr("refs/bad")));
}

TEST(ResolveSourceTest, ADirectoryIsItself) {
  EXPECT_THAT(ResolveSource("tests/data/laguna-micro/"), IsOkAndHolds(testing::EndsWith("/tests/data/laguna-micro")));
}

}  // namespace
}  // namespace quern::checkpoint
