#include "client/runtime_directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern::client {
namespace {

constexpr char kPrefix[] = "quern-run-";
constexpr char kLockName[] = "lock";
// sockaddr_un holds 107 bytes and a NUL: "<base>/quern-run-XXXXXX/quern.sock".
constexpr size_t kMaxBase = 107 - sizeof("/quern-run-XXXXXX/quern.sock");
// A directory without a lock is one that is just being made, unless it is older than this.
constexpr time_t kSecondsToLock = 60;

bool IsAbandoned(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid()) return false;
  const UniqueFd lock(open(JoinPath(path, kLockName).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!lock) return errno == ENOENT && time(nullptr) - info.st_mtime > kSecondsToLock;
  return flock(lock.get(), LOCK_EX | LOCK_NB) == 0;
}

void RemoveAbandoned(const std::string& base) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(base);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const std::string path = JoinPath(base, name);
    // Housekeeping only: what cannot be removed now is tried again by the next command.
    if (absl::StartsWith(name, kPrefix) && IsAbandoned(path)) RemoveTree(path).IgnoreError();
  }
}

}  // namespace

std::string RuntimeBase() {
  const char* wanted = getenv("XDG_RUNTIME_DIR");
  struct stat info;
  if (wanted != nullptr && wanted[0] == '/' && absl::string_view(wanted).size() <= kMaxBase && stat(wanted, &info) == 0 &&
      S_ISDIR(info.st_mode) && access(wanted, W_OK | X_OK) == 0) {
    return wanted;
  }
  return "/tmp";
}

absl::StatusOr<RuntimeDirectory> RuntimeDirectory::Make(const std::string& base) {
  RemoveAbandoned(base);
  while (true) {
    std::string path = JoinPath(base, absl::StrCat(kPrefix, "XXXXXX"));
    if (mkdtemp(path.data()) == nullptr) return ErrnoToStatus(errno, "mkdtemp", path);
    QUERN_ASSIGN_OR_RETURN(UniqueFd lock, OpenFile(JoinPath(path, kLockName), O_RDWR | O_CREAT, 0600));
    if (flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return RuntimeDirectory(std::move(path), std::move(lock));
    // Another command took the new directory for an abandoned one, between our two calls, and is removing it.
    if (errno != EWOULDBLOCK) return ErrnoToStatus(errno, "flock", path);
  }
}

RuntimeDirectory::~RuntimeDirectory() {
  if (!path_.empty()) RemoveTree(path_).IgnoreError();
}

}  // namespace quern::client
