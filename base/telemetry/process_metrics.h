// Figures of this process under the names that every exporter has for them.
#ifndef QUERN_BASE_TELEMETRY_PROCESS_METRICS_H_
#define QUERN_BASE_TELEMETRY_PROCESS_METRICS_H_

#include <string>
#include <vector>

#include "base/metrics.h"

namespace quern {

// Appends process_cpu_seconds_total, process_resident_memory_bytes, process_open_fds, process_start_time_seconds, and
// quern_build_info{program,version,numerics}. What /proc does not tell has no sample.
void AddProcessMetrics(const std::string& program, const std::string& version, uint64_t numerics_version, std::vector<MetricFamily>* out);

}  // namespace quern

#endif  // QUERN_BASE_TELEMETRY_PROCESS_METRICS_H_
