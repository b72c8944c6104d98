// The memory cgroup that this process runs in, versions 1 and 2: how often the OOM killer struck in it, and its limit.
#ifndef QUERN_WORKER_SUPERVISOR_CGROUP_H_
#define QUERN_WORKER_SUPERVISOR_CGROUP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::worker {

// Where a process's memory cgroup is found.
struct MemoryCgroup {
  int version = 0;          // 1 or 2
  std::string directory;    // for example "/sys/fs/cgroup/memory/jobs/17"
  std::string mount_point;  // the hierarchy's: ancestors of `directory` reach up to here
  friend bool operator==(const MemoryCgroup&, const MemoryCgroup&) = default;
};

// From the text of /proc/self/cgroup and /proc/self/mountinfo. Version 1 comes first where both exist, since the memory controller is bound
// to one of them, and a version 1 line naming `memory` says to which. A path outside the mounted part of the hierarchy (a container without
// a cgroup namespace) means the mount point itself. NOT_FOUND when no memory hierarchy is mounted.
absl::StatusOr<MemoryCgroup> FindMemoryCgroup(absl::string_view cgroup_text, absl::string_view mountinfo_text);

// The value of the line "oom_kill N" in memory.oom_control, memory.events or /proc/vmstat. NOT_FOUND where there is none (version 1 before
// Linux 4.13).
absl::StatusOr<uint64_t> ParseOomKills(absl::string_view text);

// A number of bytes, "max" or version 1's huge default, both of which mean no limit.
std::optional<uint64_t> ParseMemoryLimit(absl::string_view text);

// Watches the cgroup of this process; all is best effort. Immutable, thread-safe.
class OomWatch {
 public:
  // Finds the cgroup of this process. Without one (or without its counter) kills are counted over the whole machine.
  static OomWatch ForThisProcess();
  // Reads the counter from `counter_path`.
  OomWatch(std::string counter_path, std::optional<MemoryCgroup> cgroup)
      : counter_path_(std::move(counter_path)), cgroup_(std::move(cgroup)) {}

  // Processes that the OOM killer has ended here so far; 0 when nothing tells.
  uint64_t Kills() const;
  // The smallest limit of the cgroup and its ancestors: "the memory limit of 300 MiB of cgroup /sys/fs/cgroup/memory/small", or "the
  // machine's memory" without one.
  std::string DescribeLimit() const;

 private:
  std::string counter_path_;
  std::optional<MemoryCgroup> cgroup_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_CGROUP_H_
