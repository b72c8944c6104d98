// Makes the finished shards of a job into a checkpoint directory.
//
// Protocol; each step may be repeated after a crash and the whole ends in the same directory:
//   1. unlink an old index and config.json, fsync the directory: nothing half-made looks like a checkpoint.
//   2. rename OUT/.quern/attempts/<task>.<attempt> to its final name (already there with the right size: done before); fsync.
//   3. copy side files from the source.
//   4. write quern_manifest.json, then config.json, last the index (with one shard config.json is last); fsync each and the directory.
//   5. remove OUT/.quern/attempts; write OUT/.quern/run.json.
#ifndef QUERN_DAEMON_PUBLISH_PUBLISH_H_
#define QUERN_DAEMON_PUBLISH_PUBLISH_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
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
  // Text of run.json.
  std::string run_json;
};

// Blocks. A full disk is RESOURCE_EXHAUSTED ("disk full") and leaves everything in place for another try. A shard whose size is not the
// committed one is DATA_LOSS.
absl::Status PublishJob(const PublishRequest& request);

// Path of an attempt's file.
std::string AttemptPath(const std::string& output, uint32_t task, uint32_t attempt);

// OUT is absent, empty, or one of ours that may be written: ALREADY_EXISTS otherwise, naming what is there. A finished output of ours
// is ALREADY_EXISTS too unless `overwrite`.
absl::Status CheckOutputUsable(const std::string& output, bool overwrite);

// The identity (PlanSummary.identity) recorded in OUT/.quern/run.json of a finished output; NOT_FOUND when OUT holds none.
absl::StatusOr<std::string> FinishedIdentity(const std::string& output);

// Claims OUT for `job` of the coordinator `owner`: makes OUT/.quern, holds an flock on OUT/.quern/lock and writes who it is into
// OUT/.quern/owner.json. FAILED_PRECONDITION names the owner while another holds it. Released (files removed) by Release or the
// destructor; by the kernel after a crash.
class OutputClaim {
 public:
  static absl::StatusOr<OutputClaim> Acquire(const std::string& output, const std::string& owner, const std::string& job);
  OutputClaim(OutputClaim&&) noexcept;
  OutputClaim& operator=(OutputClaim&&) noexcept;
  ~OutputClaim();
  void Release();

 private:
  OutputClaim() = default;
  std::string output_;
  int fd_ = -1;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PUBLISH_PUBLISH_H_
