#include "daemon/rpc/path_policy.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

absl::StatusOr<std::string> RealPath(const std::string& path) {
  char resolved[PATH_MAX];
  if (realpath(path.c_str(), resolved) == nullptr) return ErrnoToStatus(errno, "realpath", path);
  return std::string(resolved);
}

absl::StatusOr<std::string> ResolveExistingPart(const std::string& path) {
  std::string existing = path;
  std::string rest;
  while (true) {
    const absl::StatusOr<std::string> real = RealPath(existing);
    if (real.ok()) {
      if (rest.empty()) return real;
      return JoinPath(*real, rest);
    }
    if (!absl::IsNotFound(real.status())) return real.status();
    struct stat info;
    if (lstat(existing.c_str(), &info) == 0 && S_ISLNK(info.st_mode)) {
      return absl::InvalidArgumentError(absl::StrCat(existing, " is a link to something that does not exist"));
    }
    while (existing.size() > 1 && existing.back() == '/') existing.pop_back();
    const std::string name = BaseName(existing);
    if (name == "..") return absl::InvalidArgumentError(absl::StrCat(path, " has \"..\" behind something that does not exist"));
    if (name != "." && !name.empty()) rest = rest.empty() ? name : JoinPath(name, rest);
    existing = DirName(existing);
    if (existing.empty()) existing.push_back('/');
  }
}

}  // namespace

absl::StatusOr<PathPolicy> PathPolicy::Below(const std::vector<std::string>& roots) {
  PathPolicy policy;
  for (const std::string& root : roots) {
    absl::StatusOr<std::string> found = RealPath(root);
    if (!found.ok()) return Annotate(found.status(), absl::StrCat("--allow-root ", root));
    std::string real = *std::move(found);
    policy.roots_.push_back(std::move(real));
  }
  return policy;
}

PathPolicy PathPolicy::Everything() {
  PathPolicy policy;
  policy.everything_ = true;
  return policy;
}

absl::StatusOr<std::string> PathPolicy::Resolve(const std::string& path) const {
  if (!absl::StartsWith(path, "/")) {
    return absl::InvalidArgumentError(absl::StrCat("\"", path, "\" is no absolute path: the coordinator does not share your directory"));
  }
  if (path.find('\0') != std::string::npos) return absl::InvalidArgumentError("a path cannot hold a NUL");
  QUERN_ASSIGN_OR_RETURN(std::string real, ResolveExistingPart(path));
  if (everything_) return real;
  for (const std::string& root : roots_) {
    if (root == "/" || real == root || absl::StartsWith(real, absl::StrCat(root, "/"))) return real;
  }
  return WithReason(absl::PermissionDeniedError(absl::StrCat(
                        path, real == path ? "" : absl::StrCat(" (", real, ")"), " is outside of what this coordinator may touch (",
                        roots_.empty() ? "nothing" : absl::StrJoin(roots_, ", "), "): start quernd with --allow-root for it")),
                    "PATH_NOT_ALLOWED");
}

}  // namespace quern::daemon
