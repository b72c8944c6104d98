// What a job takes on disk beside the weights.
#ifndef QUERN_DAEMON_PLANNER_DISK_ESTIMATE_H_
#define QUERN_DAEMON_PLANNER_DISK_ESTIMATE_H_

#include <cstdint>

#include "daemon/planner/planner.h"

namespace quern::daemon {

// Bytes of index, manifest, recipe, config.json and run.json of a plan's output, and of the job store while the job runs, which a command
// without a standing coordinator keeps in the output. An upper estimate. `config_bytes`: of the source's config.json. Needs tasks, source
// files, side files, recipe and quantization_config of the plan.
uint64_t EstimateDiskBesideFiles(const Plan& plan, uint64_t config_bytes);

// Bytes of the spill files that a worker with a pool of `memory` bytes needs at one time beside the shard that it writes: scales and zero
// points that exceed their share of the pool. An upper estimate.
uint64_t EstimateSpill(const Plan& plan, uint64_t memory);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_DISK_ESTIMATE_H_
