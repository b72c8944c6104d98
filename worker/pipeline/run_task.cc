#include "worker/pipeline/run_task.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/pipeline/task_context.h"

namespace quern::worker {
namespace {

absl::StatusOr<quern::v1::TaskResult> Execute(const quern::v1::TaskSpec& spec, const TaskOptions& options, TaskControl* control) {
  if (spec.has_write_shard() == (options.output_path.empty() && options.sink == nullptr)) {
    return absl::InternalError(spec.has_write_shard() ? "the task writes a shard, but no output path was given"
                                                      : "the task writes nothing, but an output path was given");
  }
  QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<TaskContext> context, TaskContext::Create(spec, options, control));
  quern::v1::TaskResult result;
  switch (spec.work_case()) {
    case quern::v1::TaskSpec::kWriteShard:
      QUERN_RETURN_IF_ERROR(RunWriteShard(*context, spec.write_shard(), &result));
      break;
    case quern::v1::TaskSpec::kVerifyFile:
      QUERN_RETURN_IF_ERROR(RunVerifyFile(*context, spec.verify_file(), &result));
      break;
    case quern::v1::TaskSpec::kCompareShard:
      QUERN_RETURN_IF_ERROR(RunCompareShard(*context, spec.compare_shard(), &result));
      break;
    case quern::v1::TaskSpec::WORK_NOT_SET:
      return absl::InvalidArgumentError("the task is of a kind that this worker does not know");
  }
  context->FillResult(&result);
  return result;
}

}  // namespace

absl::StatusOr<quern::v1::TaskResult> RunTask(const quern::v1::TaskSpec& spec, const TaskOptions& options, TaskControl* control) {
  absl::StatusOr<quern::v1::TaskResult> result = Execute(spec, options, control);
  if (result.ok()) return result;
  absl::Status status = result.status();
  if (FailureOf(status).reason() == quern::v1::DISK_FULL) {
    // All of the shard is asked for again: its partial file is gone.
    status = absl::Status(status.code(), absl::StrCat(status.message(), "; the shard takes ", spec.write_shard().file_size(),
                                                      " bytes: free as many and resume"));
    return WithFailure(std::move(status), quern::v1::DISK_FULL, spec.write_shard().file_size());
  }
  return status;
}

}  // namespace quern::worker
