// The program `quern`.
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "client/app.h"

int main(int argc, char** argv) {
  // A closed pipe (quern plan | head) is an error of the write, so that children are still ended and directories removed.
  signal(SIGPIPE, SIG_IGN);
  // gRPC's own messages do not belong on a user's terminal; what they mean is in the status of the call.
  gpr_set_log_function([](gpr_log_func_args*) {});
  // Abseil as distributions build it keeps a graph of all mutexes that a thread holds, and gRPC locks some at each call.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);

  // Never given back: when its last user is gone, gRPC ends its threads, and one that is polling makes that take ten seconds.
  grpc_init();

  quern::client::Console console{.out = std::cout, .err = std::cerr};
  console.err_is_terminal = isatty(STDERR_FILENO) == 1;
  struct winsize size;
  if (console.err_is_terminal && ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) console.err_width = size.ws_col;
  return quern::client::RunApp(std::vector<std::string>(argv + 1, argv + argc), console);
}
