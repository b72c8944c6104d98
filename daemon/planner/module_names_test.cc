#include "daemon/planner/module_names.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using ::testing::ElementsAre;

TEST(ModuleNames, NumbersHaveNoLeadingZerosAndFewDigits) {
  EXPECT_TRUE(IsNumber("0"));
  EXPECT_TRUE(IsNumber("123456789"));
  for (const char* text : {"", "01", "1234567890", "1a", "-1"}) EXPECT_FALSE(IsNumber(text)) << text;
}

TEST(ModuleNames, NaturalOrder) {
  EXPECT_LT(NaturalKey("layers.2.x"), NaturalKey("layers.10.x"));
  EXPECT_LT(NaturalKey("layers.2.a"), NaturalKey("layers.2.b"));
  EXPECT_EQ(NaturalKey("a.b"), "a.b");
}

TEST(ModuleNames, Template) { EXPECT_EQ(NameTemplate("model.layers.10.mlp.experts.3.w1"), "model.layers.#.mlp.experts.#.w1"); }

TEST(ModuleNames, SummaryStandsForAllNames) {
  std::vector<std::string> names = {"lm_head"};
  for (const char* layer : {"0", "1", "2", "3", "7", "8"}) names.push_back(std::string("model.layers.") + layer + ".mlp.experts.4.w1");
  names.push_back("model.layers.5.mlp.up_proj");
  EXPECT_THAT(SummarizeNames(names),
              ElementsAre("lm_head", "model.layers.{0-3,7,8}.mlp.experts.4.w1 (6 modules)", "model.layers.5.mlp.up_proj"));
  EXPECT_TRUE(SummarizeNames({}).empty());
}

}  // namespace
}  // namespace quern::daemon
