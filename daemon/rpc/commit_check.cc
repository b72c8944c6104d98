#include "daemon/rpc/commit_check.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/vfs.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/fingerprint.h"
#include "daemon/publish/publish.h"

namespace quern::daemon {
namespace {

constexpr uint64_t kSampleSize = 4096;
constexpr size_t kSamples = 8;
constexpr absl::Duration kLookAgain = absl::Milliseconds(100);

// Filesystems on which a file written elsewhere may take a while to show.
bool IsNetworkFilesystem(const std::string& path) {
  struct statfs info;
  if (statfs(path.c_str(), &info) != 0) return false;
  switch (static_cast<uint32_t>(info.f_type)) {
    case 0x6969:      // NFS
    case 0xFF534D42:  // CIFS
    case 0xFE534D42:  // SMB2
    case 0x0BD00BD0:  // Lustre
    case 0x65735546:  // FUSE
    case 0x47504653:  // GPFS
    case 0x00C36400:  // Ceph
    case 0x01021997:  // 9P
      return true;
    default:
      return false;
  }
}

absl::Status LookAt(const quern::v1::WriteShard& shard, const std::string& path, const quern::v1::TaskResult& result) {
  QUERN_ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  QUERN_ASSIGN_OR_RETURN(const uint64_t size, FileSize(path));
  if (size != shard.file_size() || size != result.file_size()) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", size, " bytes; ", shard.file_size(), " were planned and ", result.file_size(), " reported"));
  }
  std::string header(shard.header().size(), '\0');
  QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), 0, header.data(), header.size(), path));
  if (header != shard.header()) return absl::DataLossError(absl::StrCat(path, " does not begin with the planned header"));
  if (Sha256Of(header) != result.header_sha256()) {
    return absl::DataLossError(absl::StrCat(path, ": the reported digest of the header is not that of the file"));
  }
  return absl::OkStatus();
}

absl::StatusOr<SightProbe> ProbeFile(quern::v1::SightChallenge::What what, const std::string& path) {
  SightProbe probe;
  probe.what = what;
  probe.path = path;
  QUERN_ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  QUERN_ASSIGN_OR_RETURN(probe.size, FileSize(path));
  const std::vector<uint64_t> offsets = checkpoint::SampleOffsets(probe.size);
  const size_t step = std::max<size_t>(1, offsets.size() / kSamples);
  for (size_t i = 0; i < offsets.size() && probe.offsets.size() < kSamples; i += step) {
    std::string sample(std::min(kSampleSize, probe.size - offsets[i]), '\0');
    QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), offsets[i], sample.data(), sample.size(), path));
    probe.offsets.push_back(offsets[i]);
    probe.samples += sample;
  }
  return probe;
}

}  // namespace

absl::Status CheckCommit(const quern::v1::TaskSpec& spec, const std::string& path, const quern::v1::TaskResult& result,
                         absl::Duration patience) {
  absl::Status status = LookAt(spec.write_shard(), path, result);
  if (status.ok() || !IsNetworkFilesystem(DirName(path))) return status;
  for (absl::Duration waited; !status.ok() && waited < patience; waited += kLookAgain) {
    absl::SleepFor(kLookAgain);
    status = LookAt(spec.write_shard(), path, result);
  }
  return status;
}

std::string SightPath(const std::string& output) { return JoinPath(output, ".quern/sight"); }

absl::StatusOr<std::vector<SightProbe>> MakeSightProbes(const quern::v1::JobSpec& spec, const quern::v1::PlanSummary& plan,
                                                        const quern::v1::TaskSpec* first_task) {
  std::vector<SightProbe> probes;
  if (first_task == nullptr) return probes;
  const auto add = [&probes](quern::v1::SightChallenge::What what, const std::string& path) {
    absl::StatusOr<SightProbe> probe = ProbeFile(what, path);
    if (!probe.ok()) return probe.status();
    probes.push_back(*std::move(probe));
    return absl::OkStatus();
  };
  if (plan.source_files_size() > 0) QUERN_RETURN_IF_ERROR(add(quern::v1::SightChallenge::SOURCE, plan.source_files(0).path()));
  if (spec.operation() == quern::v1::VERIFY) {
    const std::string& path = first_task->has_verify_file() ? first_task->verify_file().path() : first_task->compare_shard().path();
    // A file that is missing is for the task to report.
    if (!path.empty() && FileExists(path)) QUERN_RETURN_IF_ERROR(add(quern::v1::SightChallenge::OUTPUT, path));
    return probes;
  }
  // New content each time: a worker that sees an old copy of the directory must not pass.
  std::random_device random;
  std::string nonce;
  for (int i = 0; i < 8; ++i) absl::StrAppend(&nonce, absl::Hex(random(), absl::kZeroPad8));
  const std::string path = SightPath(spec.output());
  QUERN_RETURN_IF_ERROR(MakeDirectories(DirName(path)));
  QUERN_RETURN_IF_ERROR(WriteFileDurably(path, nonce));
  QUERN_RETURN_IF_ERROR(add(quern::v1::SightChallenge::OUTPUT, path));
  probes.back().create_in = AttemptDirectory(spec.output());
  return probes;
}

}  // namespace quern::daemon
