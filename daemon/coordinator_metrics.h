// The metrics of a coordinator. docs/operations.md, "Read the metrics", has the table of them, and a test holds the two together.
#ifndef QUERN_DAEMON_COORDINATOR_METRICS_H_
#define QUERN_DAEMON_COORDINATOR_METRICS_H_

#include <vector>

#include "base/metrics.h"
#include "daemon/queue/queue_figures.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/server.h"

namespace quern::daemon {

// As they are now. Thread-safe; takes the queue's mutex once.
std::vector<MetricFamily> CollectCoordinatorMetrics(Coordinator& coordinator, Server& server, const StoreMetrics& store);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_COORDINATOR_METRICS_H_
