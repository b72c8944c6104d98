// What an executor does with an attempt in earnest: the streaming pipeline.
#ifndef QUERN_WORKER_EXECUTOR_PIPELINE_HOOKS_H_
#define QUERN_WORKER_EXECUTOR_PIPELINE_HOOKS_H_

#include "worker/executor/executor.h"

namespace quern::worker {

// RunTask and FailureOf.
ExecutorHooks PipelineHooks();

}  // namespace quern::worker

#endif  // QUERN_WORKER_EXECUTOR_PIPELINE_HOOKS_H_
