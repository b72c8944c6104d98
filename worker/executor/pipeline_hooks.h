// What an executor does with an attempt in earnest: the streaming pipeline.
#ifndef QUERN_WORKER_EXECUTOR_PIPELINE_HOOKS_H_
#define QUERN_WORKER_EXECUTOR_PIPELINE_HOOKS_H_

#include <string>

#include "base/path_map.h"
#include "worker/executor/executor.h"
#include "worker/pipeline/data_plane.h"

namespace quern::worker {

// What the process of an executor is given once, beside its attempts.
struct PipelineSettings {
  PathMap paths;                    // from the coordinator's paths to those here
  DataPlane* data_plane = nullptr;  // null: every file must be here. Outlives the hooks
  std::string spool;                // directory for side tensors of shards that are sent away
};

// RunTask and FailureOf.
ExecutorHooks PipelineHooks(PipelineSettings settings = {});

}  // namespace quern::worker

#endif  // QUERN_WORKER_EXECUTOR_PIPELINE_HOOKS_H_
