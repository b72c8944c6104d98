// The state directory of a private coordinator: OUT/.quern/state, or a directory of the user where OUT lies on a network filesystem
// (RocksDB needs locks and syncs that those do not keep).
#ifndef QUERN_CLIENT_OUTPUT_STATE_H_
#define QUERN_CLIENT_OUTPUT_STATE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"

namespace quern::client {

// NFS, SMB, 9p, FUSE, Ceph, Lustre, GPFS, BeeGFS, AFS: the number of statfs(2).
bool IsNetworkFilesystem(unsigned long type);

// $XDG_STATE_HOME/quern/<digest of output>, by default under $HOME/.local/state.
absl::StatusOr<std::string> UserStateDirectory(const std::string& output);

// Not thread-safe.
class OutputState {
 public:
  // Makes the state directory for the absolute path `output`, and `output` itself where it is in there, and locks it against other commands
  // for as long as this lives: FAILED_PRECONDITION where one is at work. Before that: ALREADY_EXISTS where `output` is a file, or holds
  // something and no sign of Quern.
  static absl::StatusOr<OutputState> Prepare(const std::string& output);

  const std::string& directory() const { return directory_; }
  // Whether an earlier run left state to go on from.
  bool existed() const { return existed_; }
  // Whether the coordinator of a command that was killed still has the state open: it takes a moment to notice and to end.
  bool HeldByOldCoordinator() const;
  // After the job: removes the state, and its parent where that is empty now. Keeps the rest.
  absl::Status RemoveState();
  // After a refusal: removes what Prepare made, and directories made by it that are empty now.
  absl::Status Undo();

 private:
  OutputState() = default;
  std::string directory_;
  bool existed_ = false;
  UniqueFd lock_;                  // on the directory
  std::vector<std::string> made_;  // directories that Prepare made, parents first, without directory_
};

}  // namespace quern::client

#endif  // QUERN_CLIENT_OUTPUT_STATE_H_
