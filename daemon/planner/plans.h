// The planner of each operation; MakePlan chooses.
#ifndef QUERN_DAEMON_PLANNER_PLANS_H_
#define QUERN_DAEMON_PLANNER_PLANS_H_

#include "absl/status/statusor.h"
#include "daemon/planner/planner.h"
#include "quern/v1/jobs.pb.h"

namespace quern::daemon {

absl::StatusOr<Plan> PlanQuantize(const quern::v1::QuantizeSpec& spec, bool with_fingerprints);
absl::StatusOr<Plan> PlanDequantize(const quern::v1::DequantizeSpec& spec, bool with_fingerprints);
absl::StatusOr<Plan> PlanVerify(const quern::v1::VerifySpec& spec, const std::string& directory, bool with_fingerprints);
absl::StatusOr<Plan> PlanSynthesize(const quern::v1::SynthesizeSpec& spec);

// Identities of the operations without a source.
absl::StatusOr<quern::v1::PlanSummary> VerifyIdentity(const quern::v1::VerifySpec& spec, const std::string& directory);
absl::StatusOr<quern::v1::PlanSummary> SynthesizeIdentity(const quern::v1::SynthesizeSpec& spec);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_PLANS_H_
