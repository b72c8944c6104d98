// The least buffer pool that a task can run with.
#ifndef QUERN_DAEMON_PLANNER_MINIMUM_MEMORY_H_
#define QUERN_DAEMON_PLANNER_MINIMUM_MEMORY_H_

#include <cstdint>

#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// Bytes. `encoded`: the unit's weight is quantized, not only compared with what was made of it. Of units that no worker can run, the least
// of any.
uint64_t MinimumMemory(const quern::v1::QuantizeUnit& unit, bool encoded = true);

// Of all units of a task.
uint64_t MinimumMemory(const quern::v1::TaskSpec& task);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_MINIMUM_MEMORY_H_
