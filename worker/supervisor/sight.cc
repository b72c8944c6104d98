#include "worker/supervisor/sight.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

constexpr uint64_t kSampleSize = 4096;

absl::StatusOr<std::string> DigestSamples(const quern::v1::SightChallenge& challenge) {
  if (challenge.offsets_size() > kMaxSightSamples) {
    return absl::InvalidArgumentError(absl::StrCat(challenge.offsets_size(), " samples, more than ", kMaxSightSamples));
  }
  // Not blocking: the path may be a FIFO here.
  QUERN_ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(challenge.path(), O_RDONLY | O_NONBLOCK));
  struct stat info;
  if (fstat(file.get(), &info) != 0) return ErrnoToStatus(errno, "stat", challenge.path());
  if (!S_ISREG(info.st_mode)) return absl::FailedPreconditionError(absl::StrCat(challenge.path(), " is no regular file"));
  const uint64_t size = info.st_size;
  if (size != challenge.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat(challenge.path(), " has ", size, " bytes here, the coordinator sees ", challenge.size()));
  }
  Sha256 digest;
  digest.Update(challenge.nonce());
  char sample[kSampleSize];
  for (const uint64_t offset : challenge.offsets()) {
    const uint64_t length = offset >= size ? 0 : std::min(kSampleSize, size - offset);
    QUERN_RETURN_IF_ERROR(ReadExactly(file.get(), offset, sample, length, challenge.path()));
    digest.Update(sample, length);
  }
  return digest.Finish();
}

}  // namespace

quern::v1::SightAnswer AnswerSight(const quern::v1::SightChallenge& challenge) {
  quern::v1::SightAnswer answer;
  answer.set_job(challenge.job());
  answer.set_what(challenge.what());
  answer.set_nonce(challenge.nonce());
  const absl::StatusOr<std::string> digest = DigestSamples(challenge);
  answer.set_seen(digest.ok());
  if (digest.ok()) {
    answer.set_digest(*digest);
  } else {
    answer.set_detail(std::string(digest.status().message()));
  }
  return answer;
}

}  // namespace quern::worker
