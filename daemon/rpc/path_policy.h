// Which paths a client may name.
#ifndef QUERN_DAEMON_RPC_PATH_POLICY_H_
#define QUERN_DAEMON_RPC_PATH_POLICY_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace quern::daemon {

// Immutable. Paths are compared after links are followed, so a link inside a root that leads out of it does not help.
class PathPolicy {
 public:
  // Everything below `roots`, which must exist.
  static absl::StatusOr<PathPolicy> Below(const std::vector<std::string>& roots);
  // For the coordinator of one command, which acts with the rights of its user.
  static PathPolicy Everything();

  // The absolute path with links followed as far as it exists. PERMISSION_DENIED outside of the roots, INVALID_ARGUMENT for a relative
  // path, a broken link, or ".." behind a part that does not exist.
  absl::StatusOr<std::string> Resolve(const std::string& path) const;

 private:
  bool everything_ = false;
  std::vector<std::string> roots_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_PATH_POLICY_H_
