// Child processes. Spawned, never forked: gRPC's threads do not survive a fork.
#ifndef QUERN_BASE_SUBPROCESS_H_
#define QUERN_BASE_SUBPROCESS_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file.h"

namespace quern {

// How a child ended.
struct ExitState {
  bool signaled = false;
  int code = 0;  // exit status, or the signal's number when `signaled`
  // "exit status 1" or "signal 9 (Killed)".
  std::string ToString() const;
};

// A child that holds the read end of a pipe whose write end only we hold: when we die, however we die, the child sees the end of
// file on the descriptor named by its --parent-fd flag and exits. Not thread-safe. The destructor kills and reaps.
class Subprocess {
 public:
  struct Options {
    std::vector<std::string> argv;                   // argv[0] is the path of the program
    std::vector<std::pair<int, int>> inherited_fds;  // (ours, number in the child); all others are closed on exec
    // Appends "--parent-fd=N" to argv.
    bool tie_to_parent = true;
    // File that takes stderr and stdout (appended); empty: inherited.
    std::string log_path;
    // Own process group: a Ctrl-C of the terminal reaches only us.
    bool new_process_group = true;
  };

  static absl::StatusOr<Subprocess> Spawn(const Options& options);
  Subprocess(Subprocess&& other) noexcept;
  Subprocess& operator=(Subprocess&& other) noexcept;
  ~Subprocess();

  pid_t pid() const { return pid_; }
  // True until Wait or Poll has reaped it.
  bool running() const { return pid_ > 0; }
  absl::Status Kill(int signal);
  // Closes our end of the pipe, which asks the child to exit.
  void CloseParentPipe() { parent_pipe_.Reset(); }
  // Blocks until the child has ended.
  absl::StatusOr<ExitState> Wait();
  // Returns at once: whether it has ended; fills `state` then.
  absl::StatusOr<bool> Poll(ExitState* state);

 private:
  Subprocess() = default;
  pid_t pid_ = -1;
  UniqueFd parent_pipe_;
};

// In the child: starts a thread that runs `on_gone` once the parent's pipe `fd` reports end of file. With fd < 0 does nothing.
void WatchParent(int fd, void (*on_gone)());

// Directory of the running program's file.
std::string ProgramDirectory();

}  // namespace quern

#endif  // QUERN_BASE_SUBPROCESS_H_
