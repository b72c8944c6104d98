// What a module needs beside its weight: E[x^2] of its input channels, read whole, and the largest magnitude of its activations.
#ifndef QUERN_WORKER_PIPELINE_MODULE_INPUTS_H_
#define QUERN_WORKER_PIPELINE_MODULE_INPUTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"
#include "worker/io/buffer_pool.h"
#include "worker/pipeline/engine.h"
#include "worker/pipeline/task_context.h"

namespace quern::worker {

class LoadedInputs {
 public:
  // Checks the inputs of a unit whose weight has `cols` columns and starts the step that reads them, into memory of the pool's held part
  // that lives as long as the object. By the task's thread; blocks for the memory. With `all`, those that the scheme needs must be there.
  static absl::StatusOr<std::shared_ptr<const LoadedInputs>> Start(TaskContext& context, const quern::v1::QuantizeUnit& unit,
                                                                   const quant::Scheme& scheme, int64_t cols, bool all);

  // What must be open before Get() is used; empty if nothing is read.
  const std::vector<std::shared_ptr<Gate>>& awaits() const { return awaits_; }
  const quant::ModuleInputs& Get() const { return inputs_; }
  uint64_t held_bytes() const { return memory_.size(); }

 private:
  quant::ModuleInputs inputs_;
  PoolBuffer memory_;
  std::vector<std::shared_ptr<Gate>> awaits_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_MODULE_INPUTS_H_
