#include "worker/io/guarded_copy.h"

#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#include <mutex>

namespace quern::worker {
namespace {

// What the thread copies right now. Only the thread itself and its own synchronous signals look at it.
struct Guard {
  sigjmp_buf jump;
  uintptr_t from;
  uintptr_t end;
};
thread_local Guard* volatile current_guard = nullptr;
struct sigaction previous_action;

void OnBusError(int signal, siginfo_t* info, void* context) {
  Guard* const guard = current_guard;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (guard != nullptr && address >= guard->from && address < guard->end) siglongjmp(guard->jump, 1);
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal);
  } else {
    // Returning runs the faulting instruction again, now with the default action.
    sigaction(signal, &previous_action, nullptr);
  }
}

void InstallHandler() {
  struct sigaction action = {};
  action.sa_sigaction = OnBusError;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous_action);
}

// Its own function, so that no local of the caller lives across the jump.
__attribute__((noinline)) void PlainCopy(void* to, const void* from, size_t size) { memcpy(to, from, size); }

}  // namespace

bool GuardedCopy(void* to, const void* from, size_t size) {
  static std::once_flag installed;
  std::call_once(installed, InstallHandler);
  Guard guard;
  guard.from = reinterpret_cast<uintptr_t>(from);
  guard.end = guard.from + size;
  if (sigsetjmp(guard.jump, 0) != 0) {
    current_guard = nullptr;
    return false;
  }
  current_guard = &guard;
  PlainCopy(to, from, size);
  current_guard = nullptr;
  return true;
}

}  // namespace quern::worker
