#include "checkpoint/index.h"

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::checkpoint {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::Eq;
using testing::HasSubstr;
using testing::Optional;
using testing::Pair;

TEST(IndexTest, ReadsMapAndMetadata) {
  QUERN_ASSERT_OK_AND_ASSIGN(const ShardIndex index, ParseShardIndex(R"({"metadata": {"total_size": 10, "total_parameters": 5.0, "x": [1]},
      "weight_map": {"b": "model-00001-of-000163.safetensors", "a": "0.safetensors"}, "more": {}})",
                                                                     "i"));
  EXPECT_THAT(index.weight_map, ElementsAre(Pair("a", "0.safetensors"), Pair("b", "model-00001-of-000163.safetensors")));
  EXPECT_THAT(index.total_size, Optional(10u));
  EXPECT_THAT(index.total_parameters, Optional(std::string("5.0")));
}

TEST(IndexTest, MetadataMayBeMissingOrOdd) {
  for (const char* text : {R"({"weight_map": {}})", R"({"metadata": null, "weight_map": {}})",
                           R"({"metadata": {"total_size": 1.5e10, "total_parameters": "many"}, "weight_map": {}})"}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const ShardIndex index, ParseShardIndex(text, "i"));
    EXPECT_THAT(index.total_size, Eq(std::nullopt)) << text;
    EXPECT_THAT(index.total_parameters, Eq(std::nullopt)) << text;
  }
}

TEST(IndexTest, EntriesThatLeadOutOfTheDirectoryAreRefusedByName) {
  for (const char* file : {"../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\\\b", "a\\u0000b"}) {
    EXPECT_THAT(ParseShardIndex(absl::StrCat(R"({"weight_map": {"model.x": ")", file, "\"}}"), "dir/index.json"),
                StatusIs(kInvalid, AllOf(HasSubstr("dir/index.json"), HasSubstr("\"model.x\""), HasSubstr("no plain file name"))))
        << file;
  }
}

TEST(IndexTest, DuplicatesAreRefused) {
  EXPECT_THAT(ParseShardIndex(R"({"weight_map": {"a": "1", "b": "1", "a": "2"}})", "i"),
              StatusIs(kInvalid, HasSubstr("\"a\" stands twice")));
  EXPECT_THAT(ParseShardIndex(R"({"weight_map": {}, "weight_map": {}})", "i"),
              StatusIs(kInvalid, HasSubstr("\"weight_map\" stands twice")));
  EXPECT_THAT(ParseShardIndex(R"({"metadata": {}, "metadata": {}, "weight_map": {}})", "i"), StatusIs(kInvalid, HasSubstr("stands twice")));
  EXPECT_THAT(ParseShardIndex(R"({"metadata": {"total_size": 1, "total_size": 2}, "weight_map": {}})", "i"),
              StatusIs(kInvalid, HasSubstr("twice")));
}

TEST(IndexTest, MalformedIndexesAreRefused) {
  for (const char* text : {"", "[]", "{}", R"({"weight_map": []})", R"({"weight_map": {"a": 1}})", R"({"weight_map": {"a": null}})",
                           R"({"weight_map": {}} x)", "version https://git-lfs.github.com/spec/v1\n"}) {
    EXPECT_THAT(ParseShardIndex(text, "dir/index.json"), StatusIs(kInvalid, HasSubstr("dir/index.json"))) << text;
  }
}

TEST(IndexTest, WrittenAsTransformersWritesIt) {
  const std::string path = "tests/data/laguna-micro/model.safetensors.index.json";
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, ReadFileToString(path));
  QUERN_ASSERT_OK_AND_ASSIGN(const ShardIndex index, ParseShardIndex(text, path));
  EXPECT_EQ(BuildShardIndex(index), text);
}

TEST(IndexTest, AnyNameReadsBack) {
  ShardIndex index;
  index.weight_map = {{"a\"b\\c\n", "x\"y"}, {"ö", "z"}};
  QUERN_ASSERT_OK_AND_ASSIGN(const ShardIndex read, ParseShardIndex(BuildShardIndex(index), "i"));
  EXPECT_EQ(read.weight_map, index.weight_map);
  EXPECT_EQ(BuildShardIndex(ShardIndex()), "{\n  \"metadata\": {},\n  \"weight_map\": {}\n}\n");
}

}  // namespace
}  // namespace quern::checkpoint
