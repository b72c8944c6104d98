// The statistics pass over weights that share a scale. A set is observed once in a task, however many of its weights the task encodes.
// Those that fit the pool's part for sets are read once: they stay in memory until they are encoded.
//
// What is held waits for units that have not begun, so taking memory for it must never wait for such a unit: a weight is held only if its
// memory is sure to be free once the steps of units that have begun end (MayHold).
#ifndef QUERN_WORKER_PIPELINE_STATISTICS_SETS_H_
#define QUERN_WORKER_PIPELINE_STATISTICS_SETS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"
#include "worker/pipeline/engine.h"
#include "worker/pipeline/module_inputs.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/weight_reader.h"
#include "worker/pipeline/weight_slab.h"

namespace quern::worker {

// Of one set, while it is observed and afterwards.
class SetStatistics {
 public:
  // Open once Get() may be called, from any thread.
  const std::shared_ptr<Gate>& ready() const { return ready_; }
  const quant::Statistics* Get() const { return result_.get(); }

 private:
  friend class StatisticsSets;
  std::shared_ptr<Gate> observed_ = std::make_shared<Gate>();
  std::shared_ptr<Gate> ready_ = std::make_shared<Gate>();
  std::unique_ptr<quant::Statistics> result_;  // written once, before ready_ opens
  Mutex mutex_;
  std::vector<std::unique_ptr<quant::Statistics>> partial_ QUERN_GUARDED_BY(mutex_);  // one a thread
};

// All methods by the task's thread.
class StatisticsSets {
 public:
  // `units` are all of the task, in the order in which they will begin; they outlive this.
  StatisticsSets(TaskContext* context, const std::vector<const quern::v1::QuantizeUnit*>& units);

  // What a unit gets of its set.
  struct Pass {
    std::shared_ptr<const SetStatistics> statistics;
    std::shared_ptr<WeightSlab> weight;  // the unit's, if it is held
    uint64_t ticket = 0;                 // of `weight`, for Started
  };
  // Starts the pass over the unit's set, unless that has been started before.
  absl::StatusOr<Pass> Observe(const quern::v1::QuantizeUnit& unit, const quant::Scheme& scheme,
                               const std::shared_ptr<WeightReader>& weight, const std::shared_ptr<const LoadedInputs>& inputs);
  // All steps of the unit that the pass was for have been started.
  void Started(const Pass& pass);

  // The pass over one weight alone, which is not held (scales that are the weight's own, over segments).
  static absl::StatusOr<std::shared_ptr<const SetStatistics>> ObserveOne(TaskContext& context, const quant::Scheme& scheme,
                                                                         const std::shared_ptr<WeightReader>& weight,
                                                                         const std::shared_ptr<const LoadedInputs>& inputs);

 private:
  struct Set {
    std::string scheme;
    std::vector<std::string> members;           // views as text
    std::map<std::string, int> uses;            // of members, by units that are to come
    std::shared_ptr<SetStatistics> statistics;  // null before the pass
    std::map<std::string, Pass> held;
  };
  // One weight that is or was held.
  struct Hold {
    uint64_t bytes;
    int uses;  // by units that have not begun
  };

  static std::string TextOf(const quern::v1::TensorView& view) { return view.SerializeAsString(); }
  absl::Status Begin(const quern::v1::QuantizeUnit& unit, const quant::Scheme& scheme, const std::shared_ptr<WeightReader>& weight,
                     const std::shared_ptr<const LoadedInputs>& inputs, Set& set);
  bool MayHold(uint64_t bytes);
  static absl::Status ObserveWeight(TaskContext& context, const quant::Scheme& scheme, quant::Shape2D shape,
                                    const std::shared_ptr<WeightReader>& reader, const std::shared_ptr<WeightSlab>& slab,
                                    const std::shared_ptr<const LoadedInputs>& inputs, const std::shared_ptr<SetStatistics>& statistics);
  static absl::Status StartMerge(TaskContext& context, const std::string& what, const std::shared_ptr<SetStatistics>& statistics);

  TaskContext& context_;
  std::map<std::string, Set> sets_;  // by statistics_key
  std::deque<Hold> holds_;           // in the order of the ring
  uint64_t first_ticket_ = 0;        // of holds_.front()
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_STATISTICS_SETS_H_
