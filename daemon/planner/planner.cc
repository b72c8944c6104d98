#include "daemon/planner/planner.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "daemon/planner/plans.h"
#include "daemon/planner/source_evidence.h"

namespace quern::daemon {
namespace {

using quern::v1::JobSpec;
using quern::v1::TensorFate;

// Every operation has its details, and only those.
absl::Status CheckDetails(const JobSpec& spec) {
  bool fits = false;
  switch (spec.operation()) {
    case quern::v1::QUANTIZE:
      fits = spec.has_quantize();
      break;
    case quern::v1::DEQUANTIZE:
      fits = spec.has_dequantize();
      break;
    case quern::v1::VERIFY:
      fits = spec.has_verify();
      break;
    case quern::v1::SYNTHESIZE:
      fits = spec.has_synthesize();
      break;
    default:
      return absl::UnimplementedError(absl::StrCat("operation ", quern::v1::Operation_Name(spec.operation()),
                                                   " is not supported; known: QUANTIZE, DEQUANTIZE, VERIFY, SYNTHESIZE"));
  }
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a job with operation ", quern::v1::Operation_Name(spec.operation()), " needs its details"));
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const JobSpec& spec, bool with_fingerprints) {
  QUERN_RETURN_IF_ERROR(CheckDetails(spec));
  switch (spec.operation()) {
    case quern::v1::QUANTIZE:
      return PlanQuantize(spec.quantize(), with_fingerprints);
    case quern::v1::DEQUANTIZE:
      return PlanDequantize(spec.dequantize(), with_fingerprints);
    case quern::v1::VERIFY:
      return PlanVerify(spec.verify(), spec.output(), with_fingerprints);
    default:
      return PlanSynthesize(spec.synthesize());
  }
}

absl::StatusOr<quern::v1::PlanSummary> MakeIdentity(const JobSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckDetails(spec));
  if (spec.operation() == quern::v1::VERIFY) return VerifyIdentity(spec.verify(), spec.output());
  if (spec.operation() == quern::v1::SYNTHESIZE) return SynthesizeIdentity(spec.synthesize());
  quern::v1::PlanSummary summary;
  if (spec.operation() == quern::v1::DEQUANTIZE) {
    QUERN_RETURN_IF_ERROR(OpenDequantize(spec.dequantize(), /*with_fingerprints=*/true, summary).status());
    return summary;
  }
  QUERN_RETURN_IF_ERROR(OpenQuantize(spec.quantize(), /*with_fingerprints=*/true, summary).status());
  return summary;
}

bool FateReader::Next(TensorFate* fate) {
  for (; task_ < plan_->tasks.size(); ++task_, unit_ = 0) {
    const quern::v1::TaskSpec& task = plan_->tasks[task_];
    while (unit_ < task.write_shard().units_size()) {
      const quern::v1::ShardUnit& unit = task.write_shard().units(unit_++);
      if (unit.has_copy()) {
        const quern::v1::CopyUnit& copy = unit.copy();
        fate->set_tensor(copy.source().tensor());
        fate->set_fate(TensorFate::COPIED);
        fate->set_reason(copy.reason());
        fate->clear_scheme();
        fate->set_role(copy.role());
        fate->set_dtype(copy.output().dtype());
        *fate->mutable_shape() = copy.output().shape();
      } else if (unit.has_quantize()) {
        const quern::v1::QuantizeUnit& quantize = unit.quantize();
        if (!weights_.insert(quantize.weight().tensor()).second) continue;
        const bool plain = absl::StartsWith(quantize.scheme(), "plain");
        fate->set_tensor(quantize.weight().tensor());
        fate->set_fate(plain ? TensorFate::COPIED : TensorFate::QUANTIZED);
        fate->set_reason(plain ? absl::StrCat("dequantized: ", quantize.reason()) : quantize.reason());
        fate->set_scheme(quantize.scheme());
        fate->set_role(quantize.role());
        fate->set_dtype(quantize.weight().dtype());
        fate->clear_shape();
        fate->add_shape(quantize.weight().rows());
        fate->add_shape(quantize.weight().cols());
      } else {
        continue;  // generated: has no source
      }
      fate->set_shard(task.label());
      return true;
    }
  }
  if (dropped_ == plan_->summary.dropped_size()) return false;
  *fate = plan_->summary.dropped(dropped_++);
  return true;
}

std::vector<TensorFate> TensorFates(const Plan& plan) {
  std::vector<TensorFate> fates;
  FateReader reader(&plan);
  TensorFate fate;
  while (reader.Next(&fate)) fates.push_back(fate);
  return fates;
}

}  // namespace quern::daemon
