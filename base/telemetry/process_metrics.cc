#include "base/telemetry/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"

namespace quern {
namespace {

double Seconds(const timeval& time) { return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6; }

// Seconds since the epoch.
absl::StatusOr<double> StartTime() {
  const absl::StatusOr<std::string> stat = ReadKernelFile("/proc/self/stat");
  if (!stat.ok()) return stat.status();
  const absl::StatusOr<std::string> machine = ReadKernelFile("/proc/stat");
  if (!machine.ok()) return machine.status();
  // Behind the name of the program, which may hold anything, the start is the twentieth field.
  const std::vector<std::string> fields = absl::StrSplit(stat->substr(stat->rfind(')') + 1), ' ', absl::SkipEmpty());
  const size_t at = machine->find("\nbtime ");
  double ticks = 0, boot = 0;
  if (fields.size() < 20 || !absl::SimpleAtod(fields[19], &ticks) || at == std::string::npos ||
      !absl::SimpleAtod(machine->substr(at + 7, machine->find('\n', at + 7) - at - 7), &boot)) {
    return absl::NotFoundError("/proc does not tell");
  }
  return boot + ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

void AddProcessMetrics(const std::string& program, const std::string& version, uint64_t numerics_version, std::vector<MetricFamily>* out) {
  using Kind = MetricFamily::Kind;
  out->emplace_back(Kind::kGauge, "quern_build_info", "Always 1")
      .Add(1, {{"program", program}, {"version", version}, {"numerics", absl::StrCat(numerics_version)}});
  rusage usage = {};
  MetricFamily& cpu = out->emplace_back(Kind::kCounter, "process_cpu_seconds_total", "User and system time of this process");
  if (getrusage(RUSAGE_SELF, &usage) == 0) cpu.Add(Seconds(usage.ru_utime) + Seconds(usage.ru_stime));
  MetricFamily& memory = out->emplace_back(Kind::kGauge, "process_resident_memory_bytes", "Resident memory of this process");
  if (const absl::StatusOr<std::string> statm = ReadKernelFile("/proc/self/statm"); statm.ok()) {
    const std::vector<std::string> pages = absl::StrSplit(*statm, ' ');
    double resident = 0;
    if (pages.size() > 1 && absl::SimpleAtod(pages[1], &resident)) memory.Add(resident * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  MetricFamily& files = out->emplace_back(Kind::kGauge, "process_open_fds", "Open file descriptors of this process");
  if (const absl::StatusOr<std::vector<std::string>> names = ListDirectory("/proc/self/fd"); names.ok()) {
    files.Add(static_cast<double>(names->size()));
  }
  MetricFamily& start = out->emplace_back(Kind::kGauge, "process_start_time_seconds", "When this process began, since the epoch");
  if (const absl::StatusOr<double> time = StartTime(); time.ok()) start.Add(*time);
}

}  // namespace quern
