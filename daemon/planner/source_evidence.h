// What a plan records of its source's files, and the identity made of it.
#ifndef QUERN_DAEMON_PLANNER_SOURCE_EVIDENCE_H_
#define QUERN_DAEMON_PLANNER_SOURCE_EVIDENCE_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"
#include "checkpoint/checkpoint.h"
#include "daemon/planner/module_inputs.h"
#include "daemon/recipe/recipe.h"
#include "quern/v1/jobs.pb.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// Names of export formats, in requests and manifests.
inline constexpr char kCompressedTensors[] = "compressed-tensors";
inline constexpr char kModelOpt[] = "modelopt";
inline constexpr char kPlain[] = "plain";  // of DEQUANTIZE

struct EvidenceOptions {
  bool samples = true;         // read 64 samples a file; without, only what the headers said
  bool whole_content = false;  // hash every byte
};

// Adds one SourceFile for each shard, in their order, to `summary`. Blocks on reads.
absl::Status AddSourceFiles(const checkpoint::Checkpoint& checkpoint, const EvidenceOptions& options, quern::v1::PlanSummary& summary);

// SHA-256 over all of `summary` that must be equal for a stored plan to be resumed: source files (but not their whole content, which only
// some runs know), recipe, max_shard_size, numerics version, and `what`, which names the operation and its other options.
std::string IdentityOf(const quern::v1::PlanSummary& summary, absl::string_view what);

// What the command line said beside the recipe's file.
RecipeShorthands ShorthandsOf(const quern::v1::QuantizeSpec& spec);

// The parts of a QUANTIZE job that both its plan and its identity need.
struct QuantizeInputs {
  checkpoint::Checkpoint checkpoint;
  Recipe recipe;
  std::string export_format;
  uint64_t max_shard_size = 0;
  ModuleInputs module_inputs;
};
// The recipe's schemes are in the convention of the export format. INVALID_ARGUMENT for one that the format does not have, or that needs a
// file which is not given. Opens the source and fills the identity's fields of `summary`; identity itself only with samples.
absl::StatusOr<QuantizeInputs> OpenQuantize(const quern::v1::QuantizeSpec& spec, bool with_fingerprints, quern::v1::PlanSummary& summary);

// The parts of a DEQUANTIZE job that both its plan and its identity need.
struct DequantizeInputs {
  checkpoint::Checkpoint checkpoint;
  DType dtype = DType::kBF16;  // of the plain weights
};
absl::StatusOr<DequantizeInputs> OpenDequantize(const quern::v1::DequantizeSpec& spec, bool with_fingerprints,
                                                quern::v1::PlanSummary& summary);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SOURCE_EVIDENCE_H_
