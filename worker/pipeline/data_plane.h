// How attempts reach files that this machine does not see: through the coordinator.
#ifndef QUERN_WORKER_PIPELINE_DATA_PLANE_H_
#define QUERN_WORKER_PIPELINE_DATA_PLANE_H_

#include <atomic>
#include <memory>

#include "quern/v1/workers.pb.h"
#include "worker/io/output_sink.h"
#include "worker/io/range_fetcher.h"

namespace quern::worker {

// Thread-safe; outlives what it makes. What is made here connects when it is first used, and ends with CANCELLED soon after `*stop`, which
// outlives it, has become true while it blocks its caller. Where the link is lost for too long the failure is LINK_LOST.
class DataPlane {
 public:
  virtual ~DataPlane() = default;
  virtual std::unique_ptr<RangeFetcher> NewFetcher(const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop) = 0;
  virtual std::unique_ptr<OutputSink> NewSink(const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop) = 0;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_DATA_PLANE_H_
