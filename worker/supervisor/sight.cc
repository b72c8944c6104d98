#include "worker/supervisor/sight.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/file_roots.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

constexpr uint64_t kSampleSize = 4096;

absl::Status CreateFile(const std::string& directory, absl::string_view nonce) {
  const std::string path = JoinPath(directory, absl::StrCat("sight-", HexDigest(nonce), "-", getpid()));
  QUERN_RETURN_IF_ERROR(OpenFile(path, O_WRONLY | O_CREAT | O_EXCL).status());
  return RemoveFile(path);
}

// Under the same rule as the attempts that will write there.
absl::StatusOr<std::optional<LinklessTree>> OutputTree(const quern::v1::SightChallenge& challenge, const PathMap& paths) {
  if (challenge.create_in().empty()) return std::nullopt;
  std::string root;
  const std::string path = paths.Apply(challenge.create_in(), &root);
  QUERN_ASSIGN_OR_RETURN(LinklessTree tree, LinklessTree::Open(root, path));
  return tree;
}

absl::StatusOr<std::string> DigestSamples(const quern::v1::SightChallenge& challenge, const PathMap& paths) {
  if (challenge.offsets_size() > kMaxSightSamples) {
    return absl::InvalidArgumentError(absl::StrCat(challenge.offsets_size(), " samples, more than ", kMaxSightSamples));
  }
  QUERN_ASSIGN_OR_RETURN(const std::optional<LinklessTree> output, OutputTree(challenge, paths));
  const std::string path = paths.Apply(challenge.path());
  QUERN_ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path, O_RDONLY));
  struct stat info;
  if (fstat(file.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  const uint64_t size = info.st_size;
  if (size != challenge.size()) {
    return absl::FailedPreconditionError(absl::StrCat(path, " has ", size, " bytes here, the coordinator sees ", challenge.size()));
  }
  Sha256 digest;
  digest.Update(challenge.nonce());
  char sample[kSampleSize];
  for (const uint64_t offset : challenge.offsets()) {
    const uint64_t length = offset >= size ? 0 : std::min(kSampleSize, size - offset);
    QUERN_RETURN_IF_ERROR(ReadExactly(file.get(), offset, sample, length, path));
    digest.Update(sample, length);
  }
  if (!challenge.create_in().empty()) QUERN_RETURN_IF_ERROR(CreateFile(paths.Apply(challenge.create_in()), challenge.nonce()));
  return digest.Finish();
}

}  // namespace

quern::v1::SightAnswer AnswerSight(const quern::v1::SightChallenge& challenge, const PathMap& paths) {
  quern::v1::SightAnswer answer;
  answer.set_job(challenge.job());
  answer.set_what(challenge.what());
  answer.set_nonce(challenge.nonce());
  const absl::StatusOr<std::string> digest = DigestSamples(challenge, paths);
  answer.set_seen(digest.ok());
  if (digest.ok()) {
    answer.set_digest(*digest);
  } else {
    answer.set_detail(std::string(digest.status().message()));
  }
  return answer;
}

}  // namespace quern::worker
