// An executor for tests: the label of a task says what it does.
#include <signal.h>
#include <stdlib.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "worker/executor/executor.h"

namespace {

using quern::worker::TaskControl;

absl::StatusOr<quern::v1::TaskResult> RunLabel(const quern::v1::StartAttempt& start, TaskControl* control) {
  const std::string& label = start.spec().label();
  control->bytes_read = 42;
  if (label == "fail") return absl::DataLossError("failed as told");
  if (label == "abort") abort();
  if (label == "kill") raise(SIGKILL);
  if (label == "exit") _Exit(7);
  if (label == "deaf") {
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  if (label == "wait") {
    while (!control->stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return absl::CancelledError("stopped");
  }
  quern::v1::TaskResult result;
  result.set_reader(label);
  result.set_file_size(start.memory());
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  int channel = -1;
  for (int i = 1; i < argc; ++i) sscanf(argv[i], "--channel-fd=%d", &channel);
  quern::worker::PrepareExecutorProcess();
  quern::worker::ExecutorHooks hooks;
  hooks.run = RunLabel;
  hooks.failure_of = [](const absl::Status& status) {
    quern::v1::Failure failure;
    failure.set_reason(quern::v1::IO_ERROR);
    failure.set_message(std::string(status.message()));
    return failure;
  };
  return quern::worker::RunExecutor(quern::UniqueFd(channel), hooks, absl::Milliseconds(20)).ok() ? 0 : 1;
}
