#include "client/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <iterator>

namespace quern::client {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
std::atomic<int> received{0};
struct sigaction previous[std::size(kSignals)];

void OnSignal(int) {
  if (received.fetch_add(1) == 0) return;
  constexpr char kAborted[] = "\nquern: aborted\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kAborted, sizeof(kAborted) - 1);  // whether it was changes nothing
  _exit(1);
}

}  // namespace

Interrupt::Interrupt() {
  received = 0;
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], nullptr, &previous[i]);
    // nohup's choice stays.
    if (previous[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

bool Interrupt::requested() const { return received > 0; }

}  // namespace quern::client
