#include "daemon/rpc/commit_check.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/fingerprint.h"
#include "daemon/publish/publish.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {
namespace {

constexpr uint64_t kSampleSize = 4096;
constexpr uint64_t kReadBackChunk = 1 << 20;
constexpr size_t kSamples = 8;
constexpr size_t kViewDigestSize = 16;
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

// Powers of two as scales may decode to infinity, no others.
bool MayDecodeToInfinity(const std::string& scheme) {
  const absl::StatusOr<quant::SchemeSpec> spec = quant::SchemeSpec::Parse(scheme);
  return spec.ok() && spec->scale == quant::ScaleType::kE8m0;
}

bool IsSound(double figure, const std::string& scheme) {
  return figure >= 0 && (std::isfinite(figure) || MayDecodeToInfinity(scheme));  // NaN is not >= 0
}

absl::Status CheckDigests(const quern::v1::WriteShard& shard, const quern::v1::TaskResult& result) {
  std::map<absl::string_view, size_t> missing;  // slices of one stack have one name
  for (const quern::v1::ShardUnit& unit : shard.units()) {
    if (unit.has_copy()) ++missing[unit.copy().source().tensor()];
    if (unit.has_quantize()) ++missing[unit.quantize().weight().tensor()];
  }
  for (const quern::v1::ViewDigest& digest : result.source_digests()) {
    if (digest.digest().size() != kViewDigestSize) {
      return absl::DataLossError(
          absl::StrCat("the digest of ", digest.tensor(), " has ", digest.digest().size(), " bytes, not ", kViewDigestSize));
    }
    const auto it = missing.find(digest.tensor());
    if (it == missing.end()) return absl::DataLossError(absl::StrCat("there is a digest too many, of ", digest.tensor()));
    if (--it->second == 0) missing.erase(it);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("there is no digest of ", missing.begin()->first));
}

absl::Status CheckErrorFigures(const quern::v1::WriteShard& shard, const quern::v1::TaskResult& result) {
  std::multimap<absl::string_view, const quern::v1::QuantizeUnit*> missing;
  for (const quern::v1::ShardUnit& unit : shard.units()) {
    if (unit.has_quantize()) missing.emplace(unit.quantize().module(), &unit.quantize());
  }
  for (const quern::v1::ModuleError& error : result.errors()) {
    const auto it = missing.find(error.module());
    if (it == missing.end()) return absl::DataLossError(absl::StrCat("there are error figures too many, of ", error.module()));
    const quern::v1::QuantizeUnit& unit = *it->second;
    if (error.count() != unit.weight().rows() * unit.weight().cols() || error.nonfinite() > error.count() ||
        !std::isfinite(error.sum_squares()) || error.sum_squares() < 0 || !IsSound(error.sum_squared_error(), unit.scheme()) ||
        !IsSound(error.max_abs_error(), unit.scheme())) {
      return absl::DataLossError(absl::StrCat("the error figures of ", error.module(), " cannot be: ", error.count(), " elements of ",
                                              unit.weight().rows() * unit.weight().cols(), ", ", error.nonfinite(),
                                              " of them not finite, sum of squares ", error.sum_squares(), ", of squared errors ",
                                              error.sum_squared_error(), ", largest error ", error.max_abs_error()));
    }
    missing.erase(it);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("there are no error figures of ", missing.begin()->first));
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

absl::Status CheckReport(const quern::v1::TaskSpec& spec, const quern::v1::TaskResult& result) {
  if (!spec.has_write_shard()) return absl::OkStatus();
  absl::Status status = absl::OkStatus();
  if (result.sha256().size() != Sha256::kSize) {
    status = absl::DataLossError(absl::StrCat("the SHA-256 has ", result.sha256().size(), " bytes, not ", Sha256::kSize));
  }
  if (status.ok()) status = CheckDigests(spec.write_shard(), result);
  if (status.ok()) status = CheckErrorFigures(spec.write_shard(), result);
  return Annotate(status, absl::StrCat("what the worker reports of ", spec.label(), " does not fit the plan"));
}

absl::Status CheckCommit(const quern::v1::TaskSpec& spec, const std::string& path, const quern::v1::TaskResult& result,
                         absl::Duration patience) {
  QUERN_RETURN_IF_ERROR(CheckReport(spec, result));
  absl::Status status = LookAt(spec.write_shard(), path, result);
  if (status.ok() || !IsNetworkFilesystem(DirName(path))) return status;
  for (absl::Duration waited; !status.ok() && waited < patience; waited += kLookAgain) {
    absl::SleepFor(kLookAgain);
    status = LookAt(spec.write_shard(), path, result);
  }
  return status;
}

absl::Status CheckContent(const std::string& path, const std::string& sha256, const std::function<bool()>& stop) {
  QUERN_ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  QUERN_ASSIGN_OR_RETURN(const uint64_t size, FileSize(path));
  Sha256 sha;
  std::string chunk;
  for (uint64_t offset = 0; offset < size; offset += chunk.size()) {
    if (stop()) return absl::CancelledError(absl::StrCat("read of ", path, " stopped"));
    chunk.resize(std::min(size - offset, kReadBackChunk));
    QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), offset, chunk.data(), chunk.size(), path));
    sha.Update(chunk);
  }
  const std::string found = sha.Finish();
  if (found == sha256) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(path, " has the SHA-256 ", HexDigest(found), ", not ", HexDigest(sha256)));
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
