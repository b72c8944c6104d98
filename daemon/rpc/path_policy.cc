#include "daemon/rpc/path_policy.h"

#include <errno.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {

absl::StatusOr<PathPolicy> PathPolicy::Below(const std::vector<std::string>& roots) {
  for (const std::string& root : roots) {
    if (const absl::Status usable = FileRoots::Open({root}).status(); !usable.ok()) {
      return Annotate(usable, absl::StrCat("--allow-root ", root));
    }
  }
  QUERN_ASSIGN_OR_RETURN(std::shared_ptr<const FileRoots> opened, FileRoots::Open(roots));
  return PathPolicy(std::move(opened), /*everything=*/false);
}

PathPolicy PathPolicy::Everything() {
  return PathPolicy(FileRoots::Open({"/"}).value(), /*everything=*/true);  // there is always a /
}

absl::StatusOr<std::string> PathPolicy::Resolve(const std::string& path) const {
  if (!absl::StartsWith(path, "/")) {
    return absl::InvalidArgumentError(absl::StrCat("\"", path, "\" is no absolute path: the coordinator does not share your directory"));
  }
  if (path.find('\0') != std::string::npos) return absl::InvalidArgumentError("a path cannot hold a NUL");
  FileRoots::Resolved resolved = roots_->Resolve(path);
  if (resolved.error == EXDEV) {
    const std::string roots = roots_->names().empty() ? "nothing" : absl::StrJoin(roots_->names(), ", ");
    return WithReason(absl::PermissionDeniedError(absl::StrCat(path, " is not below, or leads out of, what this coordinator may touch (",
                                                               roots, "): choose a path there, or start quernd with another --allow-root")),
                      "PATH_NOT_ALLOWED");
  }
  if (resolved.error != 0) return ErrnoToStatus(resolved.error, "look up", path);
  if (resolved.broken_link) return absl::InvalidArgumentError(absl::StrCat(path, " leads to a link to something that does not exist"));
  if (resolved.up_behind_missing) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has \"..\" behind something that does not exist"));
  }
  return std::move(resolved.path);
}

}  // namespace quern::daemon
