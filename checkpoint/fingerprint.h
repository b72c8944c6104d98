// Evidence that a source file has not changed since it was planned from.
#ifndef QUERN_CHECKPOINT_FINGERPRINT_H_
#define QUERN_CHECKPOINT_FINGERPRINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace quern::checkpoint {

struct FileFingerprint {
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  uint64_t inode = 0;
  std::string header_sha256;   // raw; of the 8 length bytes and the JSON
  std::string sample_digest;   // raw XXH3-128 of 64 seeded 4 KiB samples in the order of their offsets
  std::string blob;            // name of the blob when the path is a link into a Hugging Face cache, else empty
  std::string content_sha256;  // raw; empty unless asked for

  // What differs, for a message ("size 10 -> 12, header"); empty when nothing does. content_sha256 is compared when both have it;
  // then mtime and inode do not count, since equal content was shown.
  std::string DifferenceTo(const FileFingerprint& other) const;
};

// Offsets of the samples, ascending, for a file of `size` bytes: a fixed function of the size. Samples are 4 KiB, clipped at the end.
std::vector<uint64_t> SampleOffsets(uint64_t size);

// Reads the header and the samples; the whole file with `whole_content`. Blocks.
absl::StatusOr<FileFingerprint> FingerprintFile(const std::string& path, bool whole_content);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_FINGERPRINT_H_
