#include "checkpoint/safetensors.h"

#include <sys/stat.h>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/digest.h"
#include "base/status_matchers.h"
#include "checkpoint/test_files.h"

namespace quern::checkpoint {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

// Parses `json` as the header of a file with `data_size` bytes of data.
absl::StatusOr<SafetensorsHeader> Parse(absl::string_view json, uint64_t data_size) {
  return ParseSafetensorsHeader(json, 8 + json.size() + data_size, "dir/a.safetensors");
}

std::string Entry(absl::string_view name, absl::string_view dtype, absl::string_view shape, absl::string_view range) {
  return absl::StrFormat(R"("%s":{"dtype":"%s","shape":%s,"data_offsets":%s})", name, dtype, shape, range);
}

std::string Header(const std::vector<std::string>& entries) { return absl::StrCat("{", absl::StrJoin(entries, ","), "}"); }

TEST(SafetensorsTest, ReadsTensorsInTheOrderOfTheirRanges) {
  const std::string json =
      R"({"__metadata__":{"format":"pt"},)" + Entry("b", "F32", "[2]", "[6,14]") + "," + Entry("a", "BF16", "[3,1]", "[0,6]") + "}";
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse(json, 14));
  EXPECT_EQ(header.data_start, 8 + json.size());
  EXPECT_THAT(header.metadata, ElementsAre(Pair("format", "pt")));
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[0].dtype, DType::kBF16);
  EXPECT_THAT(header.tensors[0].shape, ElementsAre(3, 1));
  EXPECT_EQ(header.tensors[0].bytes(), 6u);
  EXPECT_EQ(header.tensors[0].elements(), 3u);
  EXPECT_EQ(header.tensors[1].begin, 6u);
}

TEST(SafetensorsTest, DigestIsOfTheLengthAndTheJson) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse("{}", 0));
  EXPECT_EQ(header.sha256, Sha256Of(RawSafetensors("{}", "")));
}

TEST(SafetensorsTest, EmptyFileOfNoTensorsIsRead) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse("{}", 0));
  EXPECT_THAT(header.tensors, IsEmpty());
}

// "safetensors header padded with spaces, tabs, newlines, NULs; leading spaces"
TEST(SafetensorsCases, JsonWhiteSpaceAroundTheHeaderIsAccepted) {
  for (const char* padding : {" ", "\t", "\n", "\r\n", "  \t\n   "}) {
    const std::string json = absl::StrCat(padding, Header({Entry("a", "U8", "[1]", "[0,1]")}), padding);
    EXPECT_THAT(Parse(json, 1), IsOk()) << testing::PrintToString(padding);
  }
}

TEST(SafetensorsCases, NulPaddingIsRejectedWithFileAndOffset) {
  const std::string object = Header({Entry("a", "U8", "[1]", "[0,1]")});
  const std::string behind = absl::StrCat(object, "  ", std::string(3, '\0'));
  EXPECT_THAT(Parse(behind, 1), StatusIs(kInvalid, AllOf(HasSubstr("dir/a.safetensors"), HasSubstr("NUL byte"),
                                                         HasSubstr(absl::StrCat("offset ", 8 + object.size() + 2)))));
  const std::string before = absl::StrCat(std::string(1, '\0'), object);
  EXPECT_THAT(Parse(before, 1), StatusIs(kInvalid, AllOf(HasSubstr("NUL byte"), HasSubstr("offset 8"))));
}

// "F32 [1000,1000] with 4 data bytes; overlapping ranges; holes; duplicate key; sizes that overflow 64 bits"
TEST(SafetensorsCases, ShapeLargerThanItsDataIsRejectedNamingTheTensor) {
  EXPECT_THAT(Parse(Header({Entry("big", "F32", "[1000,1000]", "[0,4]")}), 4),
              StatusIs(kInvalid, AllOf(HasSubstr("\"big\""), HasSubstr("needs 4000000 bytes and has 4"))));
  EXPECT_THAT(Parse(Header({Entry("big", "F32", "[1000,1000]", "[0,4000000]")}), 4),
              StatusIs(kInvalid, AllOf(HasSubstr("\"big\""), HasSubstr("past the end of the file, which has 4 bytes"))));
}

TEST(SafetensorsCases, OverlapIsRejectedNamingBothTensors) {
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[4]", "[0,4]"), Entry("b", "U8", "[4]", "[2,6]")}), 6),
              StatusIs(kInvalid, AllOf(HasSubstr("\"a\" and \"b\" overlap"), HasSubstr("offset 2"))));
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[4]", "[0,4]"), Entry("b", "U8", "[4]", "[0,4]")}), 4),
              StatusIs(kInvalid, HasSubstr("overlap")));
}

TEST(SafetensorsCases, HolesAreRejectedWhereverTheyAre) {
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[4]", "[1,5]")}), 5), StatusIs(kInvalid, HasSubstr("hole before \"a\"")));
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[4]", "[0,4]"), Entry("b", "U8", "[1]", "[6,7]")}), 7),
              StatusIs(kInvalid, AllOf(HasSubstr("4 to 6"), HasSubstr("hole before \"b\""))));
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[4]", "[0,4]")}), 9), StatusIs(kInvalid, HasSubstr("end at data offset 4, the file has 9")));
  EXPECT_THAT(Parse("{}", 1), StatusIs(kInvalid, HasSubstr("the file has 1 bytes of data")));
}

TEST(SafetensorsCases, DuplicateKeysAreRejected) {
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[4]", "[0,4]"), Entry("a", "U8", "[4]", "[4,8]")}), 8),
              StatusIs(kInvalid, HasSubstr("tensor \"a\" stands twice")));
  // The same key, spelled with an escape.
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[4]", "[0,4]"), Entry("\\u0061", "U8", "[4]", "[4,8]")}), 8),
              StatusIs(kInvalid, HasSubstr("tensor \"a\" stands twice")));
  EXPECT_THAT(Parse(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, HasSubstr("\"dtype\" stands twice")));
  EXPECT_THAT(Parse(R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, HasSubstr("\"shape\" stands twice")));
  EXPECT_THAT(Parse(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, HasSubstr("\"data_offsets\" stands twice")));
  EXPECT_THAT(Parse(R"({"__metadata__":{},"__metadata__":{}})", 0), StatusIs(kInvalid, HasSubstr("__metadata__ stands twice")));
  EXPECT_THAT(Parse(R"({"__metadata__":{"k":"1","k":"2"}})", 0), StatusIs(kInvalid, HasSubstr("\"k\" stands twice")));
}

TEST(SafetensorsCases, SizesThatOverflow64BitsAreRejected) {
  EXPECT_THAT(Parse(Header({Entry("a", "F64", "[4294967296,4294967296]", "[0,0]")}), 0),
              StatusIs(kInvalid, AllOf(HasSubstr("\"a\""), HasSubstr("overflows"))));
  // Elements fit, bits do not; a product that wraps around to the right number.
  EXPECT_THAT(Parse(Header({Entry("a", "F32", "[576460752303423489]", "[0,4]")}), 4), StatusIs(kInvalid, HasSubstr("overflows")));
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[18446744073709551616]", "[0,0]")}), 0),
              StatusIs(kInvalid, HasSubstr("does not fit 64 bits")));
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[1]", "[0,18446744073709551615]")}), 1), StatusIs(kInvalid, HasSubstr("past the end")));
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[1]", "[5,4]")}), 5), StatusIs(kInvalid, HasSubstr("ends before it begins")));
}

TEST(SafetensorsCases, HugeLengthIsRejectedBeforeAnythingIsAllocated) {
  TestDirectory directory;
  for (const std::string& length :
       {std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8), std::string("\x00\xe1\xf5\x05\x00\x00\x00\x00", 8)}) {
    QUERN_ASSERT_OK(directory.Write("a.safetensors", length + "{}"));
    EXPECT_THAT(ReadSafetensorsHeader(directory.Path("a.safetensors")), StatusIs(kInvalid, HasSubstr("a.safetensors: the ")));
  }
}

// "shapes [0] and [4,0] with begin == end; shape [1] with begin == end"
TEST(SafetensorsCases, EmptyTensorsPass) {
  const std::string json = Header({Entry("a", "F32", "[0]", "[0,0]"), Entry("b", "U8", "[2]", "[0,2]"),
                                   Entry("c", "BF16", "[4,0]", "[2,2]"), Entry("d", "BF16", "[0,4]", "[2,2]")});
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse(json, 2));
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_THAT(header.tensors[2].shape, ElementsAre(4, 0));
  EXPECT_EQ(header.tensors[2].bytes(), 0u);
}

TEST(SafetensorsCases, ShapeOfOneWithoutDataIsRejected) {
  EXPECT_THAT(Parse(Header({Entry("a", "F32", "[1]", "[0,0]")}), 0),
              StatusIs(kInvalid, AllOf(HasSubstr("\"a\""), HasSubstr("needs 4 bytes and has 0"))));
}

TEST(SafetensorsTest, ScalarHasOneElement) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse(Header({Entry("a", "F32", "[]", "[0,4]")}), 4));
  EXPECT_EQ(header.tensors[0].elements(), 1u);
  EXPECT_THAT(Parse(Header({Entry("a", "F32", "[]", "[0,0]")}), 0), StatusIs(kInvalid, HasSubstr("needs 4 bytes")));
}

// "a 130-byte Git-LFS pointer named *.safetensors"
TEST(SafetensorsCases, GitLfsPointerIsToldAsSuch) {
  TestDirectory directory;
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize "
      "12345\n";
  QUERN_ASSERT_OK(directory.Write("model.safetensors", pointer));
  EXPECT_THAT(ReadSafetensorsHeader(directory.Path("model.safetensors")),
              StatusIs(kInvalid, AllOf(HasSubstr("model.safetensors"), HasSubstr("this is a Git-LFS pointer"))));
}

// "F8_E8M0 [3], F4 [2,8] (8 bytes), unknown dtype "F3""
TEST(SafetensorsCases, RareDtypesHaveTheirSizes) {
  const std::string json = Header({Entry("e8", "F8_E8M0", "[3]", "[0,3]"), Entry("f4", "F4", "[2,8]", "[3,11]"),
                                   Entry("f6", "F6_E2M3", "[4]", "[11,14]"), Entry("c", "C64", "[1]", "[14,22]")});
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse(json, 22));
  EXPECT_EQ(header.tensors[1].dtype, DType::kF4);
  EXPECT_EQ(header.tensors[1].bytes(), 8u);
  EXPECT_THAT(Parse(Header({Entry("f4", "F4", "[3]", "[0,1]")}), 1), StatusIs(kInvalid, HasSubstr("12 bits are no whole number of bytes")));
}

TEST(SafetensorsCases, UnknownDtypeIsAClearError) {
  EXPECT_THAT(Parse(Header({Entry("x", "F3", "[1]", "[0,1]")}), 1),
              StatusIs(kInvalid, AllOf(HasSubstr("tensor \"x\""), HasSubstr("unknown dtype \"F3\""))));
}

TEST(SafetensorsTest, MalformedHeadersAreRejected) {
  for (const char* json : {
           R"()",
           R"([])",
           R"({"a")",
           R"({"a":1})",
           R"({"a":{}})",
           R"({"a":{"dtype":"U8","shape":[1]}})",
           R"({"a":{"dtype":"U8","data_offsets":[0,1]}})",
           R"({"a":{"shape":[1],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})",
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})",
           R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},})",
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} x)",
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}{})",
           R"({"a\u0007":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           "{\"a\x80\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
           R"({"a\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           R"({"__metadata__":{"a":1},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           R"({"__metadata__":[],"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":NaN}})",
       }) {
    EXPECT_THAT(Parse(json, 1), StatusIs(kInvalid, HasSubstr("dir/a.safetensors"))) << json;
  }
}

TEST(SafetensorsTest, UnknownMembersOfATensorAreSkipped) {
  EXPECT_THAT(Parse(R"({"a":{"note":[{"x":null}],"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1), IsOk());
}

TEST(SafetensorsTest, DeepNestingIsRejectedWithoutRecursingThroughIt) {
  const std::string json = absl::StrCat(R"({"a":{"x":)", std::string(1'000'000, '['));
  EXPECT_THAT(Parse(json, 1), StatusIs(kInvalid, HasSubstr("200 levels")));
}

TEST(SafetensorsTest, RankIsBounded) {
  EXPECT_THAT(Parse(Header({Entry("a", "U8", "[1" + std::string(130, ' ') + "]", "[0,1]")}), 1), IsOk());
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_THAT(Parse(Header({Entry("a", "U8", ones + "]", "[0,1]")}), 1), StatusIs(kInvalid, HasSubstr("64 dimensions")));
}

TEST(SafetensorsTest, TruncatedFilesAreRejected) {
  TestDirectory directory;
  const std::string whole = MakeSafetensors({{"a", DType::kF32, {4}}});
  const std::string path = directory.Path("a.safetensors");
  for (const size_t size : {size_t{0}, size_t{7}, size_t{8}, size_t{100}, whole.size() - 1}) {
    QUERN_ASSERT_OK(WriteFileDurably(path, whole.substr(0, size)));
    EXPECT_THAT(ReadSafetensorsHeader(path), StatusIs(kInvalid, HasSubstr(path))) << size;
  }
  QUERN_ASSERT_OK(WriteFileDurably(path, whole));
  EXPECT_THAT(ReadSafetensorsHeader(path), IsOk());
}

TEST(SafetensorsTest, DirectoriesAndFifosAreNoShards) {
  TestDirectory directory;
  EXPECT_THAT(ReadSafetensorsHeader(directory.path()), StatusIs(kInvalid, HasSubstr("no regular file")));
  ASSERT_EQ(mkfifo(directory.Path("fifo").c_str(), 0600), 0);
  EXPECT_THAT(ReadSafetensorsHeader(directory.Path("fifo")), StatusIs(kInvalid, HasSubstr("no regular file")));
  EXPECT_THAT(ReadSafetensorsHeader(directory.Path("missing")), StatusIs(absl::StatusCode::kNotFound));
}

TEST(SafetensorsTest, WrittenHeaderReadsBackAndIsAligned) {
  const std::vector<TensorInfo> tensors = Consecutive({{"model.a.weight", DType::kBF16, {64, 3}},
                                                       {"\"quoted\\\"", DType::kF32, {}},
                                                       {"empty", DType::kI8, {0, 7}},
                                                       {"größe", DType::kF4, {2, 8}}});
  const std::string header = BuildSafetensorsHeader(tensors);
  EXPECT_EQ(header.size() % 4096, 0u);
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader read,
                             ParseSafetensorsHeader(absl::string_view(header).substr(8), header.size() + tensors.back().end, "a"));
  EXPECT_EQ(read.data_start, header.size());
  EXPECT_THAT(read.metadata, ElementsAre(Pair("format", "pt")));
  ASSERT_EQ(read.tensors.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(read.tensors[i].name, tensors[i].name);
    EXPECT_EQ(read.tensors[i].dtype, tensors[i].dtype);
    EXPECT_EQ(read.tensors[i].shape, tensors[i].shape);
    EXPECT_EQ(read.tensors[i].begin, tensors[i].begin);
    EXPECT_EQ(read.tensors[i].end, tensors[i].end);
  }
  EXPECT_EQ(read.sha256, Sha256Of(header));
}

TEST(SafetensorsTest, HeaderOfAnExactMultipleIsNotPaddedFurther) {
  // Names of growing length pass through every remainder.
  for (size_t length = 3900; length < 4100; ++length) {
    const std::string header = BuildSafetensorsHeader(Consecutive({{std::string(length, 'n'), DType::kU8, {1}}}));
    EXPECT_EQ(header.size() % 4096, 0u);
    const size_t json_end = header.rfind('}');
    EXPECT_LT(header.size() - json_end, 4097u);
  }
}

TEST(SafetensorsTest, ReadsWhatTransformersWrote) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header,
                             ReadSafetensorsHeader("tests/data/laguna-micro/model-00001-of-00003.safetensors"));
  EXPECT_THAT(header.metadata, ElementsAre(Pair("format", "pt")));
  EXPECT_EQ(header.tensors[0].name, "lm_head.weight");
  EXPECT_THAT(header.tensors[0].shape, ElementsAre(1024, 128));
}

TEST(SafetensorsTest, AHundredThousandTensorsAreRead) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 100'000; ++i)
    tensors.push_back({absl::StrCat("model.layers.", i / 800, ".mlp.experts.", i % 800, ".gate_proj.weight"), DType::kBF16, {1, 2}});
  const std::string file = MakeSafetensors(tensors);
  const std::string header = BuildSafetensorsHeader(Consecutive(tensors));
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader read, ParseSafetensorsHeader(absl::string_view(header).substr(8), file.size(), "a"));
  EXPECT_EQ(read.tensors.size(), 100'000u);
}

}  // namespace
}  // namespace quern::checkpoint
