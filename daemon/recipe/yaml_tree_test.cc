#include "daemon/recipe/yaml_tree.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(YamlTree, KeepsLinesAndOrder) {
  QUERN_ASSERT_OK_AND_ASSIGN(const YamlNode root, ParseYaml("a: 1\nb:\n  - x\n  - 'null'\nc: null\nd: {e: ~}\n"));
  ASSERT_EQ(root.kind, YamlNode::Kind::kMap);
  ASSERT_EQ(root.members.size(), 4u);
  EXPECT_EQ(root.members[0].key, "a");
  EXPECT_EQ(root.Find("a")->scalar, "1");
  EXPECT_EQ(root.Find("b")->items[1].scalar, "null");
  EXPECT_EQ(root.Find("b")->items[1].line, 4);
  EXPECT_TRUE(root.Find("c")->IsNull());
  EXPECT_TRUE(root.Find("d")->Find("e")->IsNull());
  EXPECT_EQ(root.Find("f"), nullptr);
}

TEST(YamlTree, EmptyTextIsNull) {
  QUERN_ASSERT_OK_AND_ASSIGN(const YamlNode root, ParseYaml(" # nothing\n"));
  EXPECT_TRUE(root.IsNull());
}

TEST(YamlTree, BrokenTextNamesTheLine) { EXPECT_THAT(ParseYaml("a: 1\nb: [1, 2\n"), StatusIs(kInvalid, HasSubstr("recipe line "))); }

TEST(YamlTree, AliasesAreRefused) {
  EXPECT_THAT(ParseYaml("a: &x [1]\nb: [*x, *x]\n"), StatusIs(kInvalid, AllOf(HasSubstr("line 2"), HasSubstr("aliases"))));
}

TEST(YamlTree, DepthIsBounded) {
  EXPECT_THAT(ParseYaml(std::string(40, '[') + std::string(40, ']')), StatusIs(kInvalid, HasSubstr("nested deeper")));
  EXPECT_THAT(ParseYaml(std::string(200'000, '[')), StatusIs(kInvalid));
}

TEST(YamlTree, SizeIsBounded) {
  EXPECT_THAT(ParseYaml(std::string(kMaxRecipeBytes + 1, ' ')), StatusIs(kInvalid, HasSubstr("at most")));
  std::string many = "[";
  for (size_t i = 0; i <= kMaxRecipeNodes; ++i) many += "1,";
  EXPECT_THAT(ParseYaml(many + "]"), StatusIs(kInvalid, HasSubstr("values")));
  std::string keys;
  for (size_t i = 0; i <= kMaxRecipeKeys; ++i) absl::StrAppend(&keys, "k", i, ": 1\n");
  EXPECT_THAT(ParseYaml(keys), StatusIs(kInvalid, HasSubstr("keys in one mapping")));
}

TEST(YamlTree, DuplicateKeysAreRefused) {
  EXPECT_THAT(ParseYaml("a: 1\na: 2\n"), StatusIs(kInvalid, AllOf(HasSubstr("line 2"), HasSubstr("\"a\" is there twice"))));
}

TEST(YamlTree, SecondDocumentAndTagsAreRefused) {
  EXPECT_THAT(ParseYaml("a: 1\n---\nb: 1\n"), StatusIs(kInvalid, HasSubstr("second document")));
  EXPECT_THAT(ParseYaml("a: !!python/object:os.system 1\n"), StatusIs(kInvalid, HasSubstr("tag")));
}

TEST(YamlTree, KeysMustBeTexts) { EXPECT_THAT(ParseYaml("? [a]\n: 1\n"), StatusIs(kInvalid, HasSubstr("key"))); }

}  // namespace
}  // namespace quern::daemon
