#include "worker/executor/pipeline_hooks.h"

#include <algorithm>

#include "base/status_macros.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

absl::StatusOr<quern::v1::TaskResult> Run(const quern::v1::StartAttempt& start, TaskControl* control) {
  TaskOptions options;
  options.memory = start.memory();
  options.threads = std::max<int>(1, start.threads());
  options.output_path = start.output_path();
  if (!start.reader().empty()) {
    QUERN_ASSIGN_OR_RETURN(options.reader, ParseReaderMode(start.reader()));
  }
  return RunTask(start.spec(), options, control);
}

}  // namespace

ExecutorHooks PipelineHooks() { return {Run, FailureOf}; }

}  // namespace quern::worker
