#include "daemon/recipe/recipe.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using quant::Strategy;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

absl::StatusOr<Recipe> Parse(absl::string_view yaml) { return ParseRecipe(yaml, {}); }

bool Matches(absl::string_view pattern, absl::string_view module, Role role = Role::kOther, bool linear = true) {
  absl::StatusOr<Pattern> parsed = Pattern::Parse(pattern);
  EXPECT_THAT(parsed, IsOk());
  return parsed.ok() && parsed->Matches(module, role, linear);
}

TEST(Pattern, RoleMatchesByRole) {
  EXPECT_TRUE(Matches("attention", "model.layers.0.self_attn.q_proj", Role::kAttention));
  EXPECT_FALSE(Matches("attention", "attention", Role::kMlp));
  EXPECT_TRUE(Matches("lm_head", "lm_head", Role::kLmHead, false));
}

TEST(Pattern, LinearMatchesLinearModules) {
  EXPECT_TRUE(Matches("Linear", "x.y", Role::kMlp, true));
  EXPECT_FALSE(Matches("Linear", "x.y", Role::kRouter, false));
}

TEST(Pattern, ExactNameMatchesWhole) {
  EXPECT_TRUE(Matches("model.layers.1", "model.layers.1"));
  EXPECT_FALSE(Matches("model.layers.1", "model.layers.1.mlp.up_proj"));
  EXPECT_FALSE(Matches("model.layers.1", "model.layers.10"));
}

TEST(Pattern, GlobMatchesWhole) {
  EXPECT_TRUE(Matches("model.layers.1.*", "model.layers.1.mlp.up_proj"));
  EXPECT_FALSE(Matches("model.layers.1.*", "model.layers.10.mlp.up_proj"));
  EXPECT_FALSE(Matches("layers.1.*", "model.layers.1.mlp.up_proj"));
  EXPECT_TRUE(Matches("*.up_proj", "model.layers.1.mlp.up_proj"));
  EXPECT_TRUE(Matches("*layers.?.*", "model.layers.1.mlp.up_proj"));
  EXPECT_FALSE(Matches("*layers.?.*", "model.layers.10.mlp.up_proj"));
  EXPECT_TRUE(Matches("a**b*", "aXbXb"));
  EXPECT_FALSE(Matches("a*b", "aXbX"));
}

TEST(Pattern, RegexMatchesAtTheStartOnly) {
  EXPECT_TRUE(Matches("re:.*q_proj", "model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(Matches("re:q_proj", "model.layers.0.self_attn.q_proj"));
  EXPECT_TRUE(Matches("re:model\\.layers\\.1", "model.layers.10.x"));
  EXPECT_FALSE(Matches("re:model\\.layers\\.1$", "model.layers.10.x"));
}

TEST(Pattern, LookaroundIsRefusedWithAnotherWay) {
  for (const char* text : {"re:.*mlp(?!.*gate)", "re:(?=.*a).*", "re:.*(?<!x)a", "re:.*(?<=x)a"}) {
    EXPECT_THAT(Pattern::Parse(text), StatusIs(kInvalid, AllOf(HasSubstr("lookaround"), HasSubstr("ignore")))) << text;
  }
  QUERN_EXPECT_OK(Pattern::Parse("re:(?P<layer>\\d+)(?i:a)(?:b)"));
  EXPECT_THAT(Pattern::Parse("re:("), StatusIs(kInvalid, AllOf(HasSubstr("RE2"), Not(HasSubstr("lookaround")))));
  EXPECT_THAT(Pattern::Parse("re:((a{900}){900}){900}"), StatusIs(kInvalid));
}

TEST(Pattern, HostileTextIsRefused) {
  EXPECT_THAT(Pattern::Parse(""), StatusIs(kInvalid));
  EXPECT_THAT(Pattern::Parse(std::string(5000, 'a')), StatusIs(kInvalid));
  EXPECT_THAT(Pattern::Parse("a\nb"), StatusIs(kInvalid));
}

TEST(Recipe, OwnFormWithEverything) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe, Parse(R"yaml(
scheme: W4A16_ASYM
group_size: 32
targets: [routed_experts]
ignore: ["re:.*layers\\.47\\..*shared.*", norms]
groups:
  - {targets: [attention], scheme: w8a16}
  - targets: mlp
    weights: {num_bits: 3, strategy: group, group_size: 64, symmetric: false}
non_divisible: keep
nonfinite: clamp
numerics: precise
)yaml"));
  ASSERT_EQ(recipe.groups.size(), 3u);
  EXPECT_EQ(recipe.groups[0].scheme.num_bits, 8);
  EXPECT_EQ(recipe.groups[0].scheme.group_size, 32);
  EXPECT_EQ(recipe.groups[0].scheme_name, "W8A16");
  EXPECT_EQ(recipe.groups[1].scheme.num_bits, 3);
  EXPECT_EQ(recipe.groups[1].scheme.group_size, 64);
  EXPECT_FALSE(recipe.groups[1].scheme.symmetric);
  EXPECT_EQ(recipe.groups[1].scheme_name, "W3A16_ASYM");
  EXPECT_EQ(recipe.groups[2].scheme.group_size, 32);
  EXPECT_EQ(recipe.groups[2].targets[0].kind(), Pattern::Kind::kRole);
  for (const RecipeGroup& group : recipe.groups) EXPECT_EQ(group.scheme.numerics, quant::Numerics::kPrecise);
  EXPECT_EQ(recipe.ignore.size(), 2u);
  EXPECT_EQ(recipe.non_divisible, NonDivisiblePolicy::kKeep);
  EXPECT_EQ(recipe.nonfinite, NonfinitePolicy::kClamp);
}

TEST(Recipe, TargetsDefaultToLinear) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe, Parse("scheme: W4A16"));
  ASSERT_EQ(recipe.groups.size(), 1u);
  ASSERT_EQ(recipe.groups[0].targets.size(), 1u);
  EXPECT_EQ(recipe.groups[0].targets[0].kind(), Pattern::Kind::kLinear);
  EXPECT_EQ(recipe.groups[0].scheme.group_size, 128);
}

TEST(Recipe, EmptyTargetsAreRefused) {
  for (const char* yaml :
       {"scheme: W4A16\ntargets: []\n", "scheme: W4A16\ntargets: ~\n", "QuantizationModifier:\n  {scheme: W4A16, targets: []}\n",
        "QuantizationModifier:\n  scheme: {W4A16: []}\n", "groups:\n  - {scheme: W4A16, targets: []}\n"}) {
    EXPECT_THAT(Parse(yaml), StatusIs(kInvalid, AllOf(HasSubstr("line 2"), HasSubstr("lists no target")))) << yaml;
  }
}

TEST(Recipe, ShorthandsAlone) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe,
                             ParseRecipe("", {.scheme = "W4A16", .group_size = "channel", .targets = {"attention"}, .ignore = {"a.b"}}));
  ASSERT_EQ(recipe.groups.size(), 1u);
  EXPECT_EQ(recipe.groups[0].scheme.strategy, Strategy::kChannel);
  EXPECT_EQ(recipe.groups[0].scheme.group_size, 0);
  EXPECT_EQ(recipe.groups[0].targets[0].text(), "attention");
  EXPECT_EQ(recipe.ignore[0].text(), "a.b");
}

TEST(Recipe, ShorthandsLeaveTheRest) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe, ParseRecipe("scheme: W4A16_ASYM\ntargets: [mlp]\nignore: [norms]\n",
                                                              {.scheme = "", .group_size = "64", .targets = {}, .ignore = {"x"}}));
  ASSERT_EQ(recipe.groups.size(), 1u);
  EXPECT_EQ(recipe.groups[0].scheme.group_size, 64);
  EXPECT_FALSE(recipe.groups[0].scheme.symmetric);
  EXPECT_EQ(recipe.groups[0].targets[0].text(), "mlp");
  EXPECT_EQ(recipe.ignore.size(), 2u);
}

TEST(Recipe, TargetsBesideSeveralGroupsAreRefused) {
  const char* yaml = "groups: [{targets: [mlp], scheme: W4A16}, {targets: [attention], scheme: W8A16}]";
  EXPECT_THAT(ParseRecipe(yaml, {.scheme = "", .group_size = "", .targets = {"mlp"}, .ignore = {}}),
              StatusIs(kInvalid, HasSubstr("several groups")));
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe, ParseRecipe(yaml, {.scheme = "W4A16", .group_size = "64", .targets = {}, .ignore = {}}));
  ASSERT_EQ(recipe.groups.size(), 3u);
  EXPECT_EQ(recipe.groups[2].targets[0].text(), "Linear");
}

TEST(Recipe, GroupsTakeTheGroupSizeOfTheTopLevel) {
  const std::string groups =
      "groups: [{targets: [mlp], scheme: W4A16}, {targets: [attention], scheme: W8A16, group_size: 64},"
      " {targets: [a], weights: {num_bits: 5, group_size: 16}}]\n";
  const auto sizes = [](const Recipe& recipe) {
    std::vector<int64_t> sizes;
    for (const RecipeGroup& group : recipe.groups) sizes.push_back(group.scheme.group_size);
    return sizes;
  };
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe alone, Parse(groups + "group_size: 32\n"));
  EXPECT_THAT(sizes(alone), ElementsAre(32, 64, 16));
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe with_scheme, Parse(groups + "group_size: 32\nscheme: W3A16\n"));
  EXPECT_THAT(sizes(with_scheme), ElementsAre(32, 64, 16, 32));
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe flag,
                             ParseRecipe(groups + "group_size: 32\n", {.scheme = "", .group_size = "8", .targets = {}, .ignore = {}}));
  EXPECT_THAT(sizes(flag), ElementsAre(8, 64, 16));
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe channel, Parse(groups + "group_size: channel\n"));
  EXPECT_EQ(channel.groups[0].scheme.strategy, Strategy::kChannel);
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe again, Parse(alone.ToYaml()));
  EXPECT_EQ(again.ToYaml(), alone.ToYaml());
}

TEST(Recipe, AGroupSizeThatReachesNoGroupIsRefused) {
  const char* yaml =
      "groups:\n  - {targets: [mlp], scheme: W4A16, group_size: 64}\n  - {targets: [attention], scheme: W8A16, group_size: 16}\n";
  EXPECT_THAT(ParseRecipe(yaml, {.scheme = "", .group_size = "32", .targets = {}, .ignore = {}}),
              StatusIs(kInvalid, HasSubstr("group_size 32 reaches no group")));
  EXPECT_THAT(Parse(absl::StrCat(yaml, "group_size: 32\n")), StatusIs(kInvalid, AllOf(HasSubstr("line 4"), HasSubstr("no group"))));
}

TEST(Recipe, NoSchemeIsRefused) {
  EXPECT_THAT(Parse(""), StatusIs(kInvalid, HasSubstr("no scheme")));
  EXPECT_THAT(Parse("ignore: [x]"), StatusIs(kInvalid, HasSubstr("no scheme")));
  EXPECT_THAT(Parse("targets: [x]"), StatusIs(kInvalid, HasSubstr("need a scheme")));
}

TEST(Recipe, UnknownKeysAreRefusedWithTheirLine) {
  EXPECT_THAT(Parse("scheme: W4A16\n\ngroupsize: 32\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("line 3"), HasSubstr("groupsize"), HasSubstr("group_size"))));
  EXPECT_THAT(Parse("groups:\n  - targets: [a]\n    scheme: W4A16\n    bits: 4\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("line 4"), HasSubstr("bits"))));
  EXPECT_THAT(Parse("weights: {num_bits: 4, group: 32}"), StatusIs(kInvalid, AllOf(HasSubstr("line 1"), HasSubstr("\"group\""))));
}

TEST(Recipe, WrongValuesAreRefusedWithTheirLine) {
  EXPECT_THAT(Parse("scheme: W4A16\ngroup_size: 0\n"), StatusIs(kInvalid, HasSubstr("line 2")));
  EXPECT_THAT(Parse("scheme: W4A16\ngroup_size: many\n"), StatusIs(kInvalid, HasSubstr("\"many\"")));
  EXPECT_THAT(Parse("scheme: W99A16\n"), StatusIs(kInvalid, AllOf(HasSubstr("line 1"), HasSubstr("W4A16_ASYM"))));
  EXPECT_THAT(Parse("scheme: W4A16\nnumerics: exact\n"), StatusIs(kInvalid, HasSubstr("reference or precise")));
  EXPECT_THAT(Parse("scheme: W4A16\nnon_divisible: pad\n"), StatusIs(kInvalid, HasSubstr("fail or keep")));
  EXPECT_THAT(Parse("scheme: W4A16\nnonfinite: zero\n"), StatusIs(kInvalid, HasSubstr("fail or clamp")));
  EXPECT_THAT(Parse("scheme: W4A16\ntargets:\n  - [a]\n"), StatusIs(kInvalid, HasSubstr("line 3")));
  EXPECT_THAT(Parse("scheme: W4A16\ntargets: {a: b}\n"), StatusIs(kInvalid, HasSubstr("list")));
  EXPECT_THAT(Parse("scheme: [W4A16]\n"), StatusIs(kInvalid, HasSubstr("single value")));
  EXPECT_THAT(Parse("- W4A16\n"), StatusIs(kInvalid, HasSubstr("mapping")));
  EXPECT_THAT(Parse("scheme: W4A16\nweights: {num_bits: 4, group_size: 32}\n"), StatusIs(kInvalid, HasSubstr("not both")));
  EXPECT_THAT(Parse("scheme: W4A16\nignore:\n  - ok\n  - 're:(?!a)'\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("line 4"), HasSubstr("lookaround"))));
  EXPECT_THAT(Parse("weights: {num_bits: 9, group_size: 32}"), StatusIs(kInvalid));
  EXPECT_THAT(Parse("weights: {num_bits: 4, strategy: channel, group_size: 32}"), StatusIs(kInvalid, HasSubstr("does not go with")));
  EXPECT_THAT(Parse("weights: {num_bits: 4, strategy: group}"), StatusIs(kInvalid, HasSubstr("needs a group_size")));
}

TEST(Recipe, LlmCompressorStages) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe, Parse(R"yaml(
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: ["lm_head"]
      config_groups:
        group_0:
          targets: ["Linear"]
          input_activations: null
          output_activations: null
          weights:
            num_bits: 4
            type: "int"
            strategy: "group"
            group_size: 32
            symmetric: false
            dynamic: false
            actorder: null
            observer: memoryless_minmax
            observer_kwargs: {}
            zp_dtype: torch.int8
)yaml"));
  ASSERT_EQ(recipe.groups.size(), 1u);
  EXPECT_EQ(recipe.groups[0].scheme_name, "W4A16_ASYM");
  EXPECT_EQ(recipe.groups[0].scheme.group_size, 32);
  EXPECT_EQ(recipe.groups[0].targets[0].kind(), Pattern::Kind::kLinear);
  EXPECT_EQ(recipe.ignore[0].text(), "lm_head");
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe own, Parse("scheme: W4A16_ASYM\ngroup_size: 32\nignore: [lm_head]\n"));
  EXPECT_EQ(recipe.ToYaml(), own.ToYaml());
}

TEST(Recipe, LlmCompressorFlat) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe,
                             Parse("QuantizationModifier:\n  targets: Linear\n  scheme: W4A16\n  ignore: [lm_head]\n"));
  ASSERT_EQ(recipe.groups.size(), 1u);
  EXPECT_EQ(recipe.groups[0].scheme_name, "W4A16");
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe mixed,
                             Parse("QuantizationModifier:\n  scheme: {W4A16: ['re:.*mlp.*'], W8A16: ['re:.*attn.*']}\n"));
  ASSERT_EQ(mixed.groups.size(), 2u);
  EXPECT_EQ(mixed.groups[1].scheme.num_bits, 8);
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe channel,
                             Parse("QuantizationModifier: {config_groups: {g: {weights: {num_bits: 8, group_size: -1}}}}"));
  EXPECT_EQ(channel.groups[0].scheme.strategy, Strategy::kChannel);
}

TEST(Recipe, LlmCompressorThatIsNotSupported) {
  EXPECT_THAT(Parse("GPTQModifier:\n  scheme: W4A16\n"), StatusIs(kInvalid, HasSubstr("GPTQModifier is not supported")));
  EXPECT_THAT(Parse("q_stage:\n  q_modifiers:\n    QuantizationModifier: {scheme: W4A16}\n    SmoothQuantModifier: {}\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("line 4"), HasSubstr("SmoothQuantModifier"))));
  EXPECT_THAT(Parse("QuantizationModifier:\n  scheme: W4A16\n  kv_cache_scheme: {num_bits: 8}\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("line 3"), HasSubstr("kv_cache_scheme"))));
  EXPECT_THAT(
      Parse("QuantizationModifier: {config_groups: {g: {weights: {num_bits: 8, group_size: -1}, input_activations: {num_bits: 8}}}}"),
      StatusIs(kInvalid, HasSubstr("input_activations")));
  EXPECT_THAT(Parse("QuantizationModifier: {config_groups: {g: {weights: {num_bits: 8, group_size: -1}, format: float-quantized}}}"),
              StatusIs(kInvalid, HasSubstr("format")));
  EXPECT_THAT(Parse("QuantizationModifier: {scheme: W4A16, weight_observer: best}"), StatusIs(kInvalid, HasSubstr("unknown observer")));
  EXPECT_THAT(Parse("QuantizationModifier: {}"), StatusIs(kInvalid, HasSubstr("scheme or config_groups")));
  EXPECT_THAT(Parse("a_stage: {b_modifiers: {}}"), StatusIs(kInvalid, HasSubstr("no QuantizationModifier")));
}

TEST(Recipe, ObserversOfPresetsAndWeights) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe,
                             Parse("groups: [{targets: [mlp], scheme: W4A16}, {targets: [attention], scheme: W8A16, observer: minmax}]\n"
                                   "scheme: W4A16\nobserver: memoryless_minmax\n"));
  for (const RecipeGroup& group : recipe.groups) EXPECT_EQ(group.scheme.observer, quant::Observer::kMinMax);
  EXPECT_THAT(Parse("scheme: W4A16\n\nobserver: best\n"), StatusIs(kInvalid, AllOf(HasSubstr("line 3"), HasSubstr("memoryless_mse"))));
  EXPECT_THAT(Parse("weights: {num_bits: 4, group_size: 32}\nobserver: minmax\n"), StatusIs(kInvalid, HasSubstr("put observer into")));
  EXPECT_THAT(Parse("observer: minmax\n"), StatusIs(kInvalid, HasSubstr("need a scheme")));
}

TEST(Recipe, InputActivationsGoWithWeights) {
  EXPECT_THAT(Parse("scheme: W4A16\ninput_activations: {num_bits: 8}\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("line 2"), HasSubstr("preset"))));
  EXPECT_THAT(Parse("weights: {num_bits: 8, strategy: channel}\ninput_activations: {num_bits: 8, strategy: token, symmetric: false, "
                    "dynamic: true}\n"),
              StatusIs(kInvalid, AllOf(HasSubstr("line 2"), HasSubstr("not supported"))));
  EXPECT_THAT(Parse("weights: {num_bits: 8, type: float, strategy: block}"), StatusIs(kInvalid, HasSubstr("block_structure")));
  EXPECT_THAT(Parse("weights: {num_bits: 8, type: float, strategy: block, block_structure: [1, 2, 3]}"),
              StatusIs(kInvalid, HasSubstr("two numbers")));
}

TEST(Recipe, CanonicalTextReadsBack) {
  for (const char* yaml : {
           "scheme: W4A16",
           "scheme: W8A16_ASYM\ngroup_size: channel\nignore: ['re:.*\\d\"x\\\\', 'a*', lm_head]\nnonfinite: clamp\n",
           "weights: {num_bits: 5, group_size: 64, symmetric: false}\ntargets: [mlp, 're:.*x$']\nnon_divisible: keep\nnumerics: precise\n",
           "groups: [{targets: [mlp], scheme: W4A16}, {targets: [attention], scheme: W8A16}]\nscheme: W3A16\n",
       }) {
    QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe, Parse(yaml));
    const std::string text = recipe.ToYaml();
    QUERN_ASSERT_OK_AND_ASSIGN(const Recipe again, Parse(text));
    EXPECT_EQ(again.ToYaml(), text);
    ASSERT_EQ(again.groups.size(), recipe.groups.size());
    for (size_t i = 0; i < recipe.groups.size(); ++i) {
      EXPECT_EQ(again.groups[i].scheme, recipe.groups[i].scheme);
      EXPECT_EQ(again.groups[i].targets.size(), recipe.groups[i].targets.size());
    }
    EXPECT_EQ(again.ignore.size(), recipe.ignore.size());
    EXPECT_EQ(again.nonfinite, recipe.nonfinite);
    EXPECT_EQ(again.non_divisible, recipe.non_divisible);
  }
}

TEST(Recipe, CanonicalText) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Recipe recipe, Parse("scheme: w4a16_asym\ngroup_size: 32\ntargets: routed_experts\n"));
  EXPECT_EQ(recipe.ToYaml(),
            "groups:\n  - targets: [\"routed_experts\"]\n    scheme: W4A16_ASYM\n    group_size: 32\nignore: []\nnon_divisible: fail\n"
            "nonfinite: fail\nnumerics: reference\n");
}

TEST(Recipe, NumberOfPatternsIsBounded) {
  std::string yaml = "scheme: W4A16\nignore: [";
  for (int i = 0; i < 5000; ++i) absl::StrAppend(&yaml, "m", i, ",");
  EXPECT_THAT(Parse(yaml + "]"), StatusIs(kInvalid, HasSubstr("5001 patterns")));
}

}  // namespace
}  // namespace quern::daemon
