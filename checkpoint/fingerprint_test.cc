#include "checkpoint/fingerprint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/status_matchers.h"
#include "checkpoint/test_files.h"

namespace quern::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

// A file large enough to be sampled in part.
std::string LargeFile(char fill) { return MakeSafetensors({{"a.weight", DType::kBF16, {1024, 1024}}}, fill); }

void SetModified(const std::string& path, int64_t seconds) {
  const timespec times[2] = {{seconds, 0}, {seconds, 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST(FingerprintTest, SamplesAreAFixedFunctionOfTheSize) {
  EXPECT_THAT(SampleOffsets(0), IsEmpty());
  EXPECT_THAT(SampleOffsets(4096), testing::ElementsAre(0));
  EXPECT_THAT(SampleOffsets(5000), testing::ElementsAre(0, 4096));
  for (const uint64_t size : {uint64_t{262143}, uint64_t{262144}, uint64_t{1'000'003}, uint64_t{53'687'091'200}}) {
    const std::vector<uint64_t> offsets = SampleOffsets(size);
    EXPECT_EQ(offsets, SampleOffsets(size));
    ASSERT_EQ(offsets.size(), 64u);
    for (size_t i = 1; i < offsets.size(); ++i) EXPECT_GE(offsets[i], offsets[i - 1] + 4096);
    EXPECT_LT(offsets.back(), size);
  }
  // Recorded once: a stored fingerprint must stay comparable.
  EXPECT_EQ(SampleOffsets(uint64_t{1} << 30)[0], 4'279'888u);
}

TEST(FingerprintTest, SameFileHasNoDifference) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("a", LargeFile('x')));
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint first, FingerprintFile(directory.Path("a"), false));
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint second, FingerprintFile(directory.Path("a"), true));
  EXPECT_EQ(first.DifferenceTo(second), "");
  EXPECT_EQ(first.size, LargeFile('x').size());
  EXPECT_THAT(first.content_sha256, IsEmpty());
  EXPECT_EQ(second.content_sha256, Sha256Of(LargeFile('x')));
  QUERN_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(directory.Path("a")));
  EXPECT_EQ(first.header_sha256, header.sha256);
}

// "same shard name with new bytes": content fingerprint before reuse
TEST(FingerprintCases, OtherWeightsOfTheSameSizeAndHeaderAreNoticedByTheirSamples) {
  TestDirectory directory;
  const std::string path = directory.Path("a");
  QUERN_ASSERT_OK(directory.Write("a", LargeFile('x')));
  SetModified(path, 1'700'000'000);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint before, FingerprintFile(path, false));
  // Rewritten in place with the old time: only the content can tell.
  QUERN_ASSERT_OK_AND_ASSIGN(UniqueFd fd, OpenFile(path, O_WRONLY));
  QUERN_ASSERT_OK(WriteExactly(fd.get(), 0, LargeFile('y').data(), LargeFile('y').size(), path));
  QUERN_ASSERT_OK(fd.Close(path));
  SetModified(path, 1'700'000'000);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint after, FingerprintFile(path, false));
  EXPECT_EQ(before.DifferenceTo(after), "sampled content");
}

TEST(FingerprintTest, AByteBetweenTheSamplesIsFoundInTheWholeContent) {
  TestDirectory directory;
  const std::string path = directory.Path("a");
  std::string content = LargeFile('x');
  QUERN_ASSERT_OK(directory.Write("a", content));
  SetModified(path, 1'700'000'000);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint before, FingerprintFile(path, true));
  const std::vector<uint64_t> offsets = SampleOffsets(content.size());
  const uint64_t gap = offsets[10] + 4096;
  ASSERT_LT(gap, offsets[11]);
  QUERN_ASSERT_OK_AND_ASSIGN(UniqueFd fd, OpenFile(path, O_WRONLY));
  QUERN_ASSERT_OK(WriteExactly(fd.get(), gap, "y", 1, path));
  QUERN_ASSERT_OK(fd.Close(path));
  SetModified(path, 1'700'000'000);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint after, FingerprintFile(path, true));
  EXPECT_EQ(before.DifferenceTo(after), "SHA-256 of the content");
}

TEST(FingerprintTest, TouchedFileDiffersUnlessItsContentIsKnown) {
  TestDirectory directory;
  const std::string path = directory.Path("a");
  QUERN_ASSERT_OK(directory.Write("a", LargeFile('x')));
  SetModified(path, 1'700'000'000);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint before, FingerprintFile(path, true));
  SetModified(path, 1'700'000'001);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint quick, FingerprintFile(path, false));
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint whole, FingerprintFile(path, true));
  EXPECT_EQ(before.DifferenceTo(quick), "modification time");
  EXPECT_EQ(before.DifferenceTo(whole), "");
}

TEST(FingerprintTest, SizeAndHeaderAreNamed) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("a", MakeSafetensors({{"a", DType::kU8, {10}}})));
  QUERN_ASSERT_OK(directory.Write("b", MakeSafetensors({{"a", DType::kU8, {12}}})));
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint a, FingerprintFile(directory.Path("a"), false));
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint b, FingerprintFile(directory.Path("b"), false));
  EXPECT_THAT(a.DifferenceTo(b), AllOf(HasSubstr("size 4106 -> 4108"), HasSubstr("header"), HasSubstr("inode")));
}

TEST(FingerprintTest, BlobOfAHuggingFaceCacheIsTakenFromTheLink) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("m/blobs/0123abcd", LargeFile('x')));
  QUERN_ASSERT_OK(MakeDirectories(directory.Path("m/snapshots/c1")));
  const std::string link = directory.Path("m/snapshots/c1/model.safetensors");
  ASSERT_EQ(symlink("../../blobs/0123abcd", link.c_str()), 0);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint linked, FingerprintFile(link, false));
  EXPECT_EQ(linked.blob, "0123abcd");
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint direct, FingerprintFile(directory.Path("m/blobs/0123abcd"), false));
  EXPECT_EQ(direct.blob, "");
  EXPECT_EQ(linked.DifferenceTo(direct), "blob 0123abcd -> none");
  ASSERT_EQ(symlink("m/snapshots/c1", directory.Path("other").c_str()), 0);
  QUERN_ASSERT_OK_AND_ASSIGN(const FileFingerprint through, FingerprintFile(directory.Path("other/model.safetensors"), false));
  EXPECT_EQ(through.blob, "0123abcd");
}

TEST(FingerprintTest, WhatIsNoShardIsRefused) {
  TestDirectory directory;
  QUERN_ASSERT_OK(directory.Write("short", "abc"));
  QUERN_ASSERT_OK(directory.Write("text", "this is no safetensors file"));
  EXPECT_THAT(FingerprintFile(directory.Path("short"), false), StatusIs(kInvalid, HasSubstr("3 bytes")));
  EXPECT_THAT(FingerprintFile(directory.Path("text"), false), StatusIs(kInvalid, HasSubstr("does not fit")));
  EXPECT_THAT(FingerprintFile(directory.path(), false), StatusIs(kInvalid, HasSubstr("no regular file")));
  EXPECT_THAT(FingerprintFile(directory.Path("gone"), false), StatusIs(absl::StatusCode::kNotFound));
}

}  // namespace
}  // namespace quern::checkpoint
