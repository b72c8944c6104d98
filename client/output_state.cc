#include "client/output_state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace quern::client {
namespace {

absl::StatusOr<bool> IsOnNetworkFilesystem(std::string path) {
  struct statfs info;
  while (statfs(path.c_str(), &info) != 0) {
    if (errno != ENOENT || path == "/") return ErrnoToStatus(errno, "statfs", path);
    path = path.rfind('/') == 0 ? "/" : DirName(path);
  }
  return IsNetworkFilesystem(static_cast<unsigned long>(info.f_type));
}

absl::Status CheckMayBeOurs(const std::string& output) {
  struct stat info;
  if (stat(output.c_str(), &info) != 0) return errno == ENOENT ? absl::OkStatus() : ErrnoToStatus(errno, "stat", output);
  if (!S_ISDIR(info.st_mode)) return absl::AlreadyExistsError(absl::StrCat(output, " is there and is no directory; choose another output"));
  QUERN_ASSIGN_OR_RETURN(std::vector<std::string> names, ListDirectory(output));
  std::erase(names, ".quern");
  if (names.empty()) return absl::OkStatus();
  // What the coordinator takes for its own, and the state of an earlier run: nothing may be made in a directory of somebody else.
  for (const char* sign : {".quern/run.json", ".quern/owner.json", ".quern/state"}) {
    if (FileExists(JoinPath(output, sign))) return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat("output ", output, " holds files that Quern did not write (for example ", names[0],
                                               "); choose an empty or a new directory"));
}

// What state that is being removed is called.
std::string GoneName(const std::string& directory) { return absl::StrCat(directory, ".gone"); }

absl::Status RemoveIfEmpty(const std::string& directory) {
  if (rmdir(directory.c_str()) == 0 || errno == ENOTEMPTY || errno == EEXIST || errno == ENOENT) return absl::OkStatus();
  return ErrnoToStatus(errno, "rmdir", directory);
}

}  // namespace

bool IsNetworkFilesystem(unsigned long type) {
  static constexpr unsigned long kTypes[] = {
      0x6969,      // NFS
      0xFF534D42,  // CIFS
      0xFE534D42,  // SMB2
      0x517B,      // SMB
      0x01021997,  // 9p
      0x65735546,  // FUSE
      0x00C36400,  // Ceph
      0x0BD00BD0,  // Lustre
      0x47504653,  // GPFS
      0x19830326,  // BeeGFS
      0x5346414F,  // AFS
      0x73757245,  // Coda
  };
  return std::find(std::begin(kTypes), std::end(kTypes), type & 0xFFFFFFFF) != std::end(kTypes);
}

absl::StatusOr<std::string> UserStateDirectory(const std::string& output) {
  const char* state_home = getenv("XDG_STATE_HOME");
  std::string base;
  if (state_home != nullptr && state_home[0] == '/') {
    base = state_home;
  } else {
    const char* home = getenv("HOME");
    if (home == nullptr || home[0] != '/') {
      return absl::FailedPreconditionError(
          absl::StrCat("the output ", output,
                       " lies on a network filesystem, and neither XDG_STATE_HOME nor HOME says where else the "
                       "state of the job can be kept; set XDG_STATE_HOME to a directory on a local disk"));
    }
    base = JoinPath(home, ".local/state");
  }
  return JoinPath(base, absl::StrCat("quern/", HexDigest(Sha256Of(output)).substr(0, 32)));
}

absl::StatusOr<OutputState> OutputState::Prepare(const std::string& output) {
  QUERN_RETURN_IF_ERROR(CheckMayBeOurs(output));
  OutputState state;
  QUERN_ASSIGN_OR_RETURN(const bool network, IsOnNetworkFilesystem(output));
  if (network) {
    QUERN_ASSIGN_OR_RETURN(state.directory_, UserStateDirectory(output));
  } else {
    state.directory_ = JoinPath(output, ".quern/state");
  }
  state.existed_ = FileExists(state.directory_);
  for (std::string parent = DirName(state.directory_); !parent.empty() && !FileExists(parent); parent = DirName(parent)) {
    state.made_.insert(state.made_.begin(), parent);
  }
  if (absl::Status status = MakeDirectories(state.directory_, 0755); !status.ok()) {
    state.Undo().IgnoreError();  // the first error is the one to tell
    return Annotate(status, "cannot make the directory for the job's state");
  }
  QUERN_ASSIGN_OR_RETURN(state.lock_, OpenFile(state.directory_, O_RDONLY | O_DIRECTORY));
  if (flock(state.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoToStatus(errno, "flock", state.directory_);
    return absl::FailedPreconditionError(absl::StrCat("another command is writing ", output, "; wait until it has ended, or stop it"));
  }
  QUERN_RETURN_IF_ERROR(RemoveTree(GoneName(state.directory_)));
  return state;
}

bool OutputState::HeldByOldCoordinator() const {
  // RocksDB's own lock file. The lock is asked for, not taken.
  const absl::StatusOr<UniqueFd> file = OpenFile(JoinPath(directory_, "LOCK"), O_RDONLY);
  if (!file.ok()) return false;
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(file->get(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

absl::Status OutputState::RemoveState() {
  // At once, so that a kill leaves all of it or nothing: no coordinator can start with half of its store.
  const std::string gone = GoneName(directory_);
  QUERN_RETURN_IF_ERROR(RemoveTree(gone));
  if (rename(directory_.c_str(), gone.c_str()) != 0 && errno != ENOENT) return ErrnoToStatus(errno, "rename", directory_);
  QUERN_RETURN_IF_ERROR(RemoveTree(gone));
  // OUT/.quern stays where run.json stands in it.
  return RemoveIfEmpty(DirName(directory_));
}

absl::Status OutputState::Undo() {
  if (existed_) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(RemoveState());
  for (auto it = made_.rbegin(); it != made_.rend(); ++it) {
    QUERN_RETURN_IF_ERROR(RemoveIfEmpty(*it));
  }
  return absl::OkStatus();
}

}  // namespace quern::client
