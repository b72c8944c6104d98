// Carries the steps of a task from reading to computing. One thread (the task's own) makes steps in the order of the output and gives each
// all the memory that it needs before it starts; nothing is acquired later. So a step waits only for older ones, and older ones never for
// it: there is no deadlock, however small the pool.
#ifndef QUERN_WORKER_PIPELINE_ENGINE_H_
#define QUERN_WORKER_PIPELINE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "worker/io/buffer_pool.h"
#include "worker/io/source_reader.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {

struct Step;

// Steps of one strand compute one after the other, in the order of Engine::Start. Internal to the engine.
struct Strand {
  uint64_t started = 0;
  uint64_t next = 0;
  std::map<uint64_t, Step*> waiting;
};

// Open when all steps that hold it have ended. Steps that await it are started after all that hold it. Internal to the engine.
struct Gate {
  uint64_t holders = 0;
  std::vector<Step*> waiting;
};

struct Step {
  using Done = std::function<void(absl::Status)>;

  std::string what;                // for messages: "tensor model.norm.weight"
  PoolBuffer buffer;               // given back when the step ends
  std::vector<ReadRequest> reads;  // without `done`
  // Runs on a compute thread once all reads are in. Calls its argument once, then or later, from any thread.
  std::function<void(Done)> compute;
  std::shared_ptr<Strand> strand;             // may be null
  std::shared_ptr<Gate> holds;                // may be null
  std::vector<std::shared_ptr<Gate>> awaits;  // none is null

  // Of the engine.
  uint64_t sequence = 0;
  uint64_t turn = 0;
  size_t blockers = 0;  // reads that are not in, gates that are not open
};

class Engine {
 public:
  struct Times {
    double read_seconds = 0;     // with at least one read under way
    double compute_seconds = 0;  // summed over threads
    double read_stall_seconds = 0;
    double compute_stall_seconds = 0;
  };

  // All outlive the engine. `control` is polled while the task's thread waits.
  Engine(SourceReader* reader, BufferRing* input, int threads, TaskControl* control);
  ~Engine() { Stop(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Ends the task with `status`; the first call counts. Thread-safe.
  void Fail(absl::Status status);

  // Waits for reads that are under way, drops steps that have not begun to compute, and ends the threads. Only Fail may be called
  // afterwards.
  void Stop();

  // The following are for the task's thread. All return the failure of the task as soon as there is one, CANCELLED after control->stop.

  // Calls `attempt` until it returns true; it blocks for about the time given to it. The time counts as a stall of the reading stage.
  absl::Status WaitUntil(const std::function<bool(absl::Duration)>& attempt);
  absl::StatusOr<PoolBuffer> AcquireInput(uint64_t size);
  // Hands a step over. Blocks while very many are under way.
  absl::Status Start(std::unique_ptr<Step> step);
  // Waits until every step started so far that holds the gate has ended.
  absl::Status WaitFor(const std::shared_ptr<Gate>& gate);
  // Waits until every step has ended.
  absl::Status Drain();

  Times times() const;

 private:
  void Compute();
  void OnRead(Step* step, const SourceHandle* file, uint64_t size, absl::Status status);
  void Unblock(Step* step) QUERN_REQUIRES(mutex_);
  void End(Step* step, absl::Status status);
  void FailLocked(absl::Status status) QUERN_REQUIRES(mutex_);
  absl::Status Wait(const std::function<bool(absl::Duration)>& attempt);

  SourceReader* const reader_;
  BufferRing* const input_;
  TaskControl* const control_;

  mutable Mutex mutex_;
  CondVar ready_changed_;                                     // for compute threads
  CondVar ended_;                                             // for the task's thread
  std::map<uint64_t, Step*> ready_ QUERN_GUARDED_BY(mutex_);  // by sequence: older steps first
  absl::Status failure_ QUERN_GUARDED_BY(mutex_);
  bool stop_ QUERN_GUARDED_BY(mutex_) = false;
  uint64_t started_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t alive_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t reading_ QUERN_GUARDED_BY(mutex_) = 0;
  absl::Duration reading_since_ QUERN_GUARDED_BY(mutex_);
  Times times_ QUERN_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_ENGINE_H_
