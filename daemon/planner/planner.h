// Turns a request into tasks by reading headers only. Pure apart from those reads: the same files and request give the same plan.
#ifndef QUERN_DAEMON_PLANNER_PLANNER_H_
#define QUERN_DAEMON_PLANNER_PLANNER_H_

#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/manifest/manifest.h"
#include "quern/v1/jobs.pb.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

struct Plan {
  quern::v1::PlanSummary summary;
  std::vector<quern::v1::TaskSpec> tasks;  // TaskSpec.index is the position
};

// Plans a QUANTIZE, DEQUANTIZE, VERIFY or SYNTHESIZE job. All problems that headers can show are found here and listed together, naming
// file, tensor and offset. Blocks on reads; CPU-bound otherwise. `with_fingerprints` false skips the samples (for `quern plan`).
absl::StatusOr<Plan> MakePlan(const quern::v1::JobSpec& spec, bool with_fingerprints);

// What must be equal for a stored plan to be resumed, without building tasks: fills source_files, resolved_recipe, max_shard_size,
// numerics_version and identity of a summary.
absl::StatusOr<quern::v1::PlanSummary> MakeIdentity(const quern::v1::JobSpec& spec);

// Why `now` may not resume `stored`: "source model-00001.safetensors changed: ...; recipe changed"; empty when it may.
// It may not when `now` knows the content of whole files and `stored` does not: there is nothing to compare it with.
std::string IdentityDifference(const quern::v1::PlanSummary& stored, const quern::v1::PlanSummary& now);

// Where the manifest of the verified output has another source_digest for a module or a copied tensor than `result`, that of a task which
// compared a shard with the source.
std::vector<quern::v1::Mismatch> SourceDigestMismatches(const Manifest& manifest, const quern::v1::TaskSpec& task,
                                                        const quern::v1::TaskResult& result);

// Goes through the fates of all source tensors of a plan, in the order of tasks, dropped ones last.
class FateReader {
 public:
  // The plan outlives the reader.
  explicit FateReader(const Plan* plan) : plan_(plan) {}
  // Fills `fate` with the next one; false when there is none.
  bool Next(quern::v1::TensorFate* fate);

 private:
  const Plan* const plan_;
  size_t task_ = 0;
  int unit_ = 0;
  int dropped_ = 0;
  absl::flat_hash_set<absl::string_view> weights_;  // told of: several modules may be cut from one tensor
};

// All of them.
std::vector<quern::v1::TensorFate> TensorFates(const Plan& plan);

// quern inspect.
absl::StatusOr<quern::v1::InspectCheckpointResponse> Inspect(const std::string& directory);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_PLANNER_H_
