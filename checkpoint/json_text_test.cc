#include "checkpoint/json_text.h"

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace quern::checkpoint {
namespace {

using testing::HasSubstr;
using testing::Optional;

TEST(JsonTextTest, AcceptsJsonAndPythonsNumbers) {
  for (const char* text : {"{}", " [1, -0.5e+3, true, false, null] ", R"("a\u00e9\ud83d\ude00\n")", "Infinity", "-Infinity", "NaN", "0",
                           "-0", "{\"a\": [Infinity, {\"b\": NaN}]}\n", "\"gr\xc3\xb6\xc3\x9f\x65\""}) {
    EXPECT_THAT(CheckJsonText(text), IsOk()) << text;
  }
}

TEST(JsonTextTest, RejectsWhatIsNoJson) {
  for (const char* text : {"",
                           "{",
                           "}",
                           "[1,]",
                           "{\"a\":1,}",
                           "{a:1}",
                           "01",
                           "1.",
                           ".5",
                           "1e",
                           "+1",
                           "--1",
                           "-NaN",
                           "Inf",
                           "tru",
                           "'a'",
                           "\"a",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "\"\t\"",
                           "1 2",
                           "// c\n1",
                           "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\"",
                           "\"\xf5\x80\x80\x80\"",
                           "\xef\xbb\xbf{}"}) {
    EXPECT_THAT(CheckJsonText(text), StatusIs(kInvalid, HasSubstr("offset"))) << text;
  }
}

TEST(JsonTextTest, NestingIsBounded) {
  EXPECT_THAT(CheckJsonText(absl::StrCat(std::string(200, '['), std::string(200, ']'))), IsOk());
  EXPECT_THAT(CheckJsonText(absl::StrCat(std::string(201, '['), std::string(201, ']'))), StatusIs(kInvalid, HasSubstr("200 levels")));
}

TEST(JsonTextTest, GetsTheTextOfAMember) {
  const char* text = R"({"a": 1.50, "b": {"c" : [1,  2] , "d": {}}, "Infinity": Infinity})";
  EXPECT_THAT(GetJsonMember(text, "a"), IsOkAndHolds(Optional(std::string("1.50"))));
  EXPECT_THAT(GetJsonMember(text, "b.c"), IsOkAndHolds(Optional(std::string("[1,  2]"))));
  EXPECT_THAT(GetJsonMember(text, "b.d"), IsOkAndHolds(Optional(std::string("{}"))));
  EXPECT_THAT(GetJsonMember(text, "Infinity"), IsOkAndHolds(Optional(std::string("Infinity"))));
  EXPECT_THAT(GetJsonMember(text, "b.x"), IsOkAndHolds(testing::Eq(std::nullopt)));
  EXPECT_THAT(GetJsonMember(text, "a.x"), IsOkAndHolds(testing::Eq(std::nullopt)));
}

TEST(JsonTextTest, OnlyAnObjectHasMembers) {
  EXPECT_THAT(GetJsonMember("[1]", "a"), StatusIs(kInvalid));
  EXPECT_THAT(SetJsonMember("1", "a", "2"), StatusIs(kInvalid));
}

TEST(JsonTextTest, KeysMatchHoweverTheyAreSpelled) {
  EXPECT_THAT(GetJsonMember(R"({"\u0061b": 1})", "ab"), IsOkAndHolds(Optional(std::string("1"))));
  EXPECT_THAT(SetJsonMember(R"({"\u0061b": 1})", "ab", "2"), IsOkAndHolds(R"({"\u0061b": 2})"));
}

TEST(JsonTextTest, AKeyThatStandsTwiceIsRefused) {
  EXPECT_THAT(SetJsonMember(R"({"a": 1, "a": 2})", "a", "3"),
              StatusIs(kInvalid, HasSubstr("\"a\" stands twice, the second time at offset 9")));
  EXPECT_THAT(SetJsonMember(R"({"a": 1, "a": 2})", "b", "3"), IsOk());
}

TEST(JsonTextTest, ReplacingKeepsEveryOtherByte) {
  EXPECT_THAT(SetJsonMember("{\n\t\"z\" :1e-06,\r\n \"a\": [1,\n2]  ,\"m\":Infinity}\n\n", "a", "true"),
              IsOkAndHolds("{\n\t\"z\" :1e-06,\r\n \"a\": true  ,\"m\":Infinity}\n\n"));
}

TEST(JsonTextTest, AddingFollowsTheStyleOfTheOthers) {
  EXPECT_THAT(SetJsonMember("{\n  \"a\": 1\n}\n", "b", "2"), IsOkAndHolds("{\n  \"a\": 1,\n  \"b\": 2\n}\n"));
  EXPECT_THAT(SetJsonMember("{\n\t\"a\":1,\n\t\"c\":3\n}", "b", "2"), IsOkAndHolds("{\n\t\"a\":1,\n\t\"c\":3,\n\t\"b\":2\n}"));
  EXPECT_THAT(SetJsonMember(R"({"a": 1})", "b", "2"), IsOkAndHolds(R"({"a": 1, "b": 2})"));
  EXPECT_THAT(SetJsonMember(R"({"a": 1, "c": 3})", "b", "2"), IsOkAndHolds(R"({"a": 1, "c": 3, "b": 2})"));
  EXPECT_THAT(SetJsonMember(R"({"a":1})", "b", "2"), IsOkAndHolds(R"({"a":1,"b":2})"));
  EXPECT_THAT(SetJsonMember(" { } ", "b", "2"), IsOkAndHolds(" {\n  \"b\": 2\n} "));
}

TEST(JsonTextTest, LinesOfAValueAreIndentedUnderTheirMember) {
  const char* value = "{\n  \"x\": [\n    1\n  ]\n}";
  EXPECT_THAT(SetJsonMember("{\n  \"a\": 1\n}", "q", value),
              IsOkAndHolds("{\n  \"a\": 1,\n  \"q\": {\n    \"x\": [\n      1\n    ]\n  }\n}"));
  EXPECT_THAT(SetJsonMember("{\n  \"q\": null\n}", "q", value), IsOkAndHolds("{\n  \"q\": {\n    \"x\": [\n      1\n    ]\n  }\n}"));
  EXPECT_THAT(SetJsonMember("{\"q\": null}", "q", value), IsOkAndHolds("{\"q\": {\n  \"x\": [\n    1\n  ]\n}}"));
}

TEST(JsonTextTest, AValueThatIsNoJsonIsNotPutIn) {
  EXPECT_THAT(SetJsonMember("{}", "a", "1, \"b\": 2"), StatusIs(kInvalid, HasSubstr("the new value of \"a\"")));
}

TEST(JsonTextTest, RemovesAMemberWithItsComma) {
  EXPECT_THAT(RemoveJsonMember("{\"a\": 1, \"b\": 2, \"c\": 3}", "a"), IsOkAndHolds("{\"b\": 2, \"c\": 3}"));
  EXPECT_THAT(RemoveJsonMember("{\"a\": 1, \"b\": 2, \"c\": 3}", "b"), IsOkAndHolds("{\"a\": 1, \"c\": 3}"));
  EXPECT_THAT(RemoveJsonMember("{\n  \"a\": 1,\n  \"b\": 2\n}\n", "b"), IsOkAndHolds("{\n  \"a\": 1\n}\n"));
  EXPECT_THAT(RemoveJsonMember("{ \"a\": 1 }", "a"), IsOkAndHolds("{}"));
  EXPECT_THAT(RemoveJsonMember("{\"t\": {\"q\": {\"x\": 1}, \"h\": 8}}", "t.q"), IsOkAndHolds("{\"t\": {\"h\": 8}}"));
  EXPECT_THAT(RemoveJsonMember("{\"t\": 1 }", "t.q"), IsOkAndHolds("{\"t\": 1 }"));
}

}  // namespace
}  // namespace quern::checkpoint
