#include "worker/supervisor/cgroup.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

constexpr char kMachineCounter[] = "/proc/vmstat";
// Version 1 says "no limit" as the largest multiple of the page size in an i64.
constexpr uint64_t kNoLimit = uint64_t{1} << 62;

struct Mount {
  std::string root;  // the part of the hierarchy that is mounted
  std::string mount_point;
};

// mountinfo escapes space, tab, newline and backslash as three octal digits.
std::string Unescape(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto octal = [&](size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      out.push_back(static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0')));
      i += 3;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

// The mount of the version 1 memory controller, or of the version 2 hierarchy.
std::optional<Mount> FindMount(absl::string_view mountinfo_text, int version) {
  for (absl::string_view line : absl::StrSplit(mountinfo_text, '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    // "36 35 98:0 ROOT MOUNT_POINT options [optional fields] - type source super_options"
    const auto separator = std::find(fields.begin(), fields.end(), "-");
    if (separator - fields.begin() < 6 || fields.end() - separator < 4) continue;
    const absl::string_view type = separator[1];
    const std::vector<absl::string_view> options = absl::StrSplit(separator[3], ',');
    const bool wanted =
        version == 2 ? type == "cgroup2" : type == "cgroup" && std::find(options.begin(), options.end(), "memory") != options.end();
    if (wanted) return Mount{Unescape(fields[3]), Unescape(fields[4])};
  }
  return std::nullopt;
}

// The path of the process in the version 1 memory hierarchy, or in version 2's.
std::optional<std::string> FindPath(absl::string_view cgroup_text, int version) {
  for (absl::string_view line : absl::StrSplit(cgroup_text, '\n')) {
    // "4:memory:/path", "0::/path"; the path may hold colons.
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(fields[1], ',');
    const bool wanted = version == 2 ? fields[0] == "0" && fields[1].empty()
                                     : std::find(controllers.begin(), controllers.end(), "memory") != controllers.end();
    if (wanted) return std::string(fields[2]);
  }
  return std::nullopt;
}

std::string DirectoryOf(const Mount& mount, absl::string_view path) {
  const absl::string_view root = mount.root == "/" ? "" : absl::string_view(mount.root);
  const bool below = absl::StartsWith(path, root) && (path.size() == root.size() || path[root.size()] == '/');
  absl::string_view rest = below ? path.substr(root.size()) : "";
  while (absl::ConsumeSuffix(&rest, "/")) {
  }
  // "/.." is what a process outside its namespace's root sees.
  if (absl::StartsWith(rest, "/..")) rest = "";
  return absl::StrCat(mount.mount_point, rest);
}

}  // namespace

absl::StatusOr<MemoryCgroup> FindMemoryCgroup(absl::string_view cgroup_text, absl::string_view mountinfo_text) {
  for (const int version : {1, 2}) {
    const std::optional<std::string> path = FindPath(cgroup_text, version);
    const std::optional<Mount> mount = FindMount(mountinfo_text, version);
    if (path.has_value() && mount.has_value()) return MemoryCgroup{version, DirectoryOf(*mount, *path), mount->mount_point};
  }
  return absl::NotFoundError("no memory cgroup hierarchy is mounted");
}

absl::StatusOr<uint64_t> ParseOomKills(absl::string_view text) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    uint64_t kills;
    if (absl::ConsumePrefix(&line, "oom_kill ") && absl::SimpleAtoi(line, &kills)) return kills;
  }
  return absl::NotFoundError("no line \"oom_kill N\"");
}

std::optional<uint64_t> ParseMemoryLimit(absl::string_view text) {
  uint64_t limit;
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &limit) || limit >= kNoLimit) return std::nullopt;
  return limit;
}

OomWatch OomWatch::ForThisProcess() {
  const absl::StatusOr<std::string> cgroups = ReadKernelFile("/proc/self/cgroup");
  const absl::StatusOr<std::string> mounts = ReadKernelFile("/proc/self/mountinfo", 16 * kMiB);
  if (!cgroups.ok() || !mounts.ok()) return OomWatch(kMachineCounter, std::nullopt);
  absl::StatusOr<MemoryCgroup> cgroup = FindMemoryCgroup(*cgroups, *mounts);
  if (!cgroup.ok()) return OomWatch(kMachineCounter, std::nullopt);
  const std::string counter = JoinPath(cgroup->directory, cgroup->version == 1 ? "memory.oom_control" : "memory.events");
  const absl::StatusOr<std::string> text = ReadKernelFile(counter);
  // The root cgroup of version 2 counts nothing.
  const bool counts = text.ok() && ParseOomKills(*text).ok();
  return OomWatch(counts ? counter : kMachineCounter, *std::move(cgroup));
}

uint64_t OomWatch::Kills() const {
  const absl::StatusOr<std::string> text = ReadKernelFile(counter_path_);
  return text.ok() ? ParseOomKills(*text).value_or(0) : 0;
}

std::string OomWatch::DescribeLimit() const {
  std::optional<uint64_t> smallest;
  std::string where;
  if (cgroup_.has_value()) {
    const std::string file = cgroup_->version == 1 ? "memory.limit_in_bytes" : "memory.max";
    for (std::string directory = cgroup_->directory; directory.size() >= cgroup_->mount_point.size(); directory = DirName(directory)) {
      const absl::StatusOr<std::string> text = ReadKernelFile(JoinPath(directory, file));
      const std::optional<uint64_t> limit = text.ok() ? ParseMemoryLimit(*text) : std::nullopt;
      if (limit.has_value() && (!smallest.has_value() || *limit < *smallest)) {
        smallest = limit;
        where = directory;
      }
      if (directory == cgroup_->mount_point) break;
    }
  }
  if (!smallest.has_value()) return "the machine's memory";
  return absl::StrCat("the memory limit of ", FormatByteSize(*smallest), " of cgroup ", where);
}

}  // namespace quern::worker
