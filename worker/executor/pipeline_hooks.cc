#include "worker/executor/pipeline_hooks.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

absl::StatusOr<quern::v1::TaskResult> RunAttempt(const PipelineSettings& settings, const quern::v1::StartAttempt& start,
                                                 TaskControl* control) {
  TaskOptions options;
  options.memory = start.memory();
  options.threads = std::max<int>(1, start.threads());
  options.paths = settings.paths;
  options.spool = settings.spool;
  if (!start.reader().empty()) {
    QUERN_ASSIGN_OR_RETURN(options.reader, ParseReaderMode(start.reader()));
  }
  if ((start.fetch_source() || start.send_output()) && settings.data_plane == nullptr) {
    return absl::InternalError("the attempt needs the data plane, which this executor does not have");
  }
  std::unique_ptr<RangeFetcher> fetcher;
  if (settings.data_plane != nullptr) fetcher = settings.data_plane->NewFetcher(start.id(), &control->stop);
  options.fetcher = fetcher.get();
  // What a task without an output is to see of the output, it reads.
  options.fetch_source = start.fetch_source() || (start.send_output() && !start.spec().has_write_shard());
  std::unique_ptr<OutputSink> sink;
  if (start.send_output() && start.spec().has_write_shard()) {
    sink = settings.data_plane->NewSink(start.id(), &control->stop);
    options.sink = sink.get();
  } else if (!start.output_path().empty()) {
    options.output_path = settings.paths.Apply(start.output_path(), &options.output_root);
  }
  return RunTask(start.spec(), options, control);
}

}  // namespace

ExecutorHooks PipelineHooks(PipelineSettings settings) {
  return {[settings = std::move(settings)](const quern::v1::StartAttempt& start, TaskControl* control) {
            return RunAttempt(settings, start, control);
          },
          FailureOf};
}

}  // namespace quern::worker
