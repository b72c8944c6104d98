// Which paths a client may name.
#ifndef QUERN_DAEMON_RPC_PATH_POLICY_H_
#define QUERN_DAEMON_RPC_PATH_POLICY_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file_roots.h"

namespace quern::daemon {

// Immutable. A path is judged by its spelling first: nothing outside of the roots is looked at, so that answers tell nothing of it. What is
// below a root is then followed, with its links, and must stay below the roots.
class PathPolicy {
 public:
  // Everything below `roots`, which must exist.
  static absl::StatusOr<PathPolicy> Below(const std::vector<std::string>& roots);
  // For the coordinator of one command, which acts with the rights of its user.
  static PathPolicy Everything();

  // The absolute path with links followed as far as it exists. PERMISSION_DENIED (PATH_NOT_ALLOWED) outside of the roots, INVALID_ARGUMENT
  // for a relative path, a broken link, or ".." behind a part that does not exist.
  absl::StatusOr<std::string> Resolve(const std::string& path) const;

  bool everything() const { return everything_; }
  // For FileConfinement: what Resolve has allowed is opened later, and must still lie there then.
  const std::shared_ptr<const FileRoots>& roots() const { return roots_; }

 private:
  PathPolicy(std::shared_ptr<const FileRoots> roots, bool everything) : roots_(std::move(roots)), everything_(everything) {}

  std::shared_ptr<const FileRoots> roots_;
  bool everything_ = false;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_PATH_POLICY_H_
