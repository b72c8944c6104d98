#include "checkpoint/fingerprint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/file_roots.h"
#include "base/status_macros.h"
#include "checkpoint/safetensors.h"

namespace quern::checkpoint {
namespace {

constexpr uint64_t kSamples = 64;
constexpr uint64_t kSampleBytes = 4 * kKiB;
constexpr size_t kChunkBytes = kMiB;
constexpr uint64_t kHeaderLengthBytes = 8;

// The finalizer of splitmix64.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// SHA-256 of the first `size` bytes.
absl::StatusOr<std::string> HashPrefix(int fd, uint64_t size, const std::string& path) {
  Sha256 sha;
  std::string chunk(std::min<uint64_t>(size, kChunkBytes), '\0');
  for (uint64_t offset = 0; offset < size; offset += chunk.size()) {
    chunk.resize(std::min<uint64_t>(size - offset, kChunkBytes));
    QUERN_RETURN_IF_ERROR(ReadExactly(fd, offset, chunk.data(), chunk.size(), path));
    sha.Update(chunk);
  }
  return sha.Finish();
}

absl::StatusOr<std::string> HashHeader(int fd, uint64_t file_size, const std::string& path) {
  unsigned char bytes[kHeaderLengthBytes];
  if (file_size < kHeaderLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a file of ", file_size, " bytes is no safetensors file"));
  }
  QUERN_RETURN_IF_ERROR(ReadExactly(fd, 0, bytes, sizeof(bytes), path));
  uint64_t length = 0;
  for (uint64_t i = 0; i < kHeaderLengthBytes; ++i) length |= uint64_t{bytes[i]} << (8 * i);
  if (length > kMaxHeaderBytes || length > file_size - kHeaderLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a header of ", length, " bytes does not fit a safetensors file of ", file_size, " bytes"));
  }
  return HashPrefix(fd, kHeaderLengthBytes + length, path);
}

absl::StatusOr<std::string> HashSamples(int fd, uint64_t file_size, const std::string& path) {
  std::string samples;
  for (const uint64_t offset : SampleOffsets(file_size)) {
    const size_t before = samples.size();
    samples.resize(before + std::min(kSampleBytes, file_size - offset));
    QUERN_RETURN_IF_ERROR(ReadExactly(fd, offset, samples.data() + before, samples.size() - before, path));
  }
  return Xxh3_128Of(samples);
}

// The name of the blob that `path` links to in a Hugging Face cache (snapshots/<commit>/f -> ../../blobs/<name>), else empty.
std::string BlobName(const std::string& path) {
  char target[PATH_MAX];
  const ssize_t size = ConfinedReadlink(path, target, sizeof(target));
  if (size <= 0 || static_cast<size_t>(size) == sizeof(target)) return "";
  const std::string link(target, size);
  return BaseName(DirName(link)) == "blobs" ? BaseName(link) : "";
}

int64_t ModifiedNanoseconds(const struct stat& info) { return int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec; }

}  // namespace

std::string FileFingerprint::DifferenceTo(const FileFingerprint& other) const {
  std::vector<std::string> differences;
  if (size != other.size) differences.push_back(absl::StrCat("size ", size, " -> ", other.size));
  if (header_sha256 != other.header_sha256) differences.push_back("header");
  if (sample_digest != other.sample_digest) differences.push_back("sampled content");
  const bool contents_known = !content_sha256.empty() && !other.content_sha256.empty();
  if (contents_known && content_sha256 != other.content_sha256) differences.push_back("SHA-256 of the content");
  if (blob != other.blob)
    differences.push_back(absl::StrCat("blob ", blob.empty() ? "none" : blob, " -> ", other.blob.empty() ? "none" : other.blob));
  // A file that was moved or touched has the same bytes; without their digest this cannot be told from a file replaced by another.
  if (!contents_known) {
    if (mtime_ns != other.mtime_ns) differences.push_back("modification time");
    if (inode != other.inode) differences.push_back("inode");
  }
  return absl::StrJoin(differences, ", ");
}

std::vector<uint64_t> SampleOffsets(uint64_t size) {
  std::vector<uint64_t> offsets;
  const uint64_t stratum = size / kSamples;
  if (stratum < kSampleBytes) {
    for (uint64_t offset = 0; offset < size; offset += kSampleBytes) offsets.push_back(offset);
    return offsets;
  }
  for (uint64_t i = 0; i < kSamples; ++i) {
    offsets.push_back(i * stratum + Mix(size ^ Mix(i)) % (stratum - kSampleBytes + 1));
  }
  return offsets;
}

absl::StatusOr<FileFingerprint> FingerprintFile(const std::string& path, bool whole_content) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY));
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  FileFingerprint fingerprint;
  fingerprint.size = info.st_size;
  fingerprint.mtime_ns = ModifiedNanoseconds(info);
  fingerprint.inode = info.st_ino;
  fingerprint.blob = BlobName(path);
  QUERN_ASSIGN_OR_RETURN(fingerprint.header_sha256, HashHeader(fd.get(), fingerprint.size, path));
  QUERN_ASSIGN_OR_RETURN(fingerprint.sample_digest, HashSamples(fd.get(), fingerprint.size, path));
  if (whole_content) {
    QUERN_ASSIGN_OR_RETURN(fingerprint.content_sha256, HashPrefix(fd.get(), fingerprint.size, path));
  }
  if (fstat(fd.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  if (static_cast<uint64_t>(info.st_size) != fingerprint.size || ModifiedNanoseconds(info) != fingerprint.mtime_ns) {
    return absl::AbortedError(absl::StrCat(path, " changed while it was read; wait until it is complete"));
  }
  return fingerprint;
}

}  // namespace quern::checkpoint
