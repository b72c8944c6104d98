// Makes the finished shards of a job into a checkpoint directory.
//
// Protocol; each step may be repeated after a crash and the whole ends in the same directory:
//   1. refuse to go on where a file lies that would be replaced and that neither an old result nor an unfinished publishing has written.
//      Write {"state": "publishing", "publishing": [names]} as OUT/.quern/run.json: from here on OUT is ours and not finished, whatever
//      happens, and so are these names. Unlink an old index and config.json, fsync the directory: nothing half-made looks like a
//      checkpoint. Unlink what an old manifest (or the run.json of a synthetic checkpoint) names, except shards that this job has put there
//      already (name, size and SHA-256 are equal), fsync, then unlink that manifest, fsync.
//   2. rename OUT/.quern/attempts/<task>.<attempt> to its final name (already there with the right size and header: done before); fsync.
//   3. copy side files from the source, write quern_recipe.yaml; fsync each and their directories.
//   4. write quern_manifest.json, then config.json, last the index (with one shard config.json is last); fsync each and the directory.
//   5. remove OUT/.quern/attempts; write OUT/.quern/run.json.
// Files of steps 3 to 5 are written as OUT/.quern/publish/<n>, fsynced, and renamed, so that no name in OUT ever has half a content. An old
// manifest that stands in OUT describes either an old result or this very one, never a mixture: it is the last to go and the first of the
// descriptions to come.
//
// An export to ModelOpt writes hf_quant_config.json in step 3. DEQUANTIZE has no recipe, and config.json has no quantization_config.
//
// SYNTHESIZE has no side files, recipe or manifest: beside .quern a plain checkpoint remains. Its run.json lists what a manifest would,
// "files": [{"name", "size", "sha256"}]. VERIFY publishes nothing.
//
// run.json is JSON text made by the coordinator: an object with at least
//   "identity": PlanSummary.identity in lower-case hexadecimal,
//   "grants" and "commits": each {"seq": place in the order of both, "task": index, "attempt": number, ...}.
#ifndef QUERN_DAEMON_PUBLISH_PUBLISH_H_
#define QUERN_DAEMON_PUBLISH_PUBLISH_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "base/file_roots.h"
#include "quern/v1/jobs.pb.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

struct CommittedTask {
  quern::v1::TaskSpec spec;
  quern::v1::TaskResult result;
  uint32_t attempt = 0;
};

struct PublishRequest {
  const quern::v1::JobSpec* spec = nullptr;
  const quern::v1::PlanSummary* plan = nullptr;
  uint32_t tasks = 0;
  // Loads one task at a time, so that a large job is never in memory as a whole.
  std::function<absl::StatusOr<CommittedTask>(uint32_t index)> load_task;
  // Text of run.json (above), without "files".
  std::string run_json;
};

// Blocks. A full disk is RESOURCE_EXHAUSTED ("disk full", with the bytes needed) and leaves everything in place for another try. A shard
// whose size is not the committed one is DATA_LOSS; a file of somebody else is ALREADY_EXISTS, as in CheckForeignFiles. The caller holds
// the OutputClaim. load_task is called several times for each index.
absl::Status PublishJob(const PublishRequest& request);

// Path of an attempt's file; its directory is AttemptDirectory.
std::string AttemptDirectory(const std::string& output);
std::string AttemptPath(const std::string& output, uint32_t task, uint32_t attempt);

// OUT is absent, empty, or one of ours that may be written: ALREADY_EXISTS otherwise, naming what is there. Ours holds .quern/owner.json or
// .quern/run.json, or nothing but .quern. A finished output of ours is ALREADY_EXISTS too unless `overwrite`; one whose manifest cannot be
// read is FAILED_PRECONDITION then, since it would not be known which files to replace. Call it before OutputClaim::Acquire, which makes
// OUT ours.
absl::Status CheckOutputUsable(const std::string& output, bool overwrite);

// ALREADY_EXISTS, naming it, when OUT holds a file that publishing `plan` with these shards would replace and that Quern did not write: it
// is neither of an old result nor of an unfinished publishing. FAILED_PRECONDITION or DATA_LOSS when an old manifest cannot be read.
absl::Status CheckForeignFiles(const std::string& output, const quern::v1::PlanSummary& plan, std::vector<std::string> shards);

// The identity (PlanSummary.identity, raw) recorded in OUT/.quern/run.json of a finished output; NOT_FOUND when OUT holds none, or, naming
// it, when a file that the manifest (or that run.json) lists is missing or of another size.
absl::StatusOr<std::string> FinishedIdentity(const std::string& output);

// Claims OUT for `job` of the coordinator `owner`: makes OUT/.quern, holds an flock on OUT/.quern/lock and writes who it is into
// OUT/.quern/owner.json. FAILED_PRECONDITION names the owner while another holds it, in this process or another. Released (both files
// removed, and directories that are left empty: OUT/.quern, and OUT where Acquire made it) by Release or the destructor; by the kernel
// after a crash, when owner.json stays and keeps OUT ours. While it is held no link is followed on the way to OUT or in it. Blocks on file
// operations only.
class OutputClaim {
 public:
  static absl::StatusOr<OutputClaim> Acquire(const std::string& output, const std::string& owner, const std::string& job);
  OutputClaim(OutputClaim&&) noexcept = default;
  OutputClaim& operator=(OutputClaim&&) noexcept;
  ~OutputClaim();
  void Release();

 private:
  OutputClaim() = default;
  std::string output_;
  std::optional<LinklessTree> tree_;
  UniqueFd lock_;
  bool made_output_ = false;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PUBLISH_PUBLISH_H_
