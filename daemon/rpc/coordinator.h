// Joins planner, queue and publish: what happens between a client's request and a finished output.
#ifndef QUERN_DAEMON_RPC_COORDINATOR_H_
#define QUERN_DAEMON_RPC_COORDINATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "daemon/planner/planner.h"
#include "daemon/publish/publish.h"
#include "daemon/queue/job_queue.h"
#include "daemon/queue/job_store.h"
#include "daemon/rpc/path_policy.h"
#include "daemon/rpc/thread_pool.h"
#include "quern/v1/jobs.pb.h"

namespace quern::daemon {

struct CoordinatorOptions {
  JobStore* store = nullptr;  // outlives the coordinator
  Clock* clock = nullptr;
  PathPolicy paths = PathPolicy::Everything();
  std::string owner;  // who holds the claims of outputs, for messages
  absl::Duration lease = absl::Seconds(30);
  absl::Duration long_poll = absl::Seconds(20);
  // How long a finished file may take to show on a network filesystem.
  absl::Duration file_patience = absl::Seconds(15);
  // The files of a job may come back later than a coordinator that was restarted, as a network filesystem after a power cut. A job whose
  // source or output cannot be read or written then is held and looked at again at this interval, for so long; then it fails.
  absl::Duration recheck_interval = absl::Seconds(1);
  absl::Duration recheck_patience = absl::Minutes(10);
  // Of a task after its first failure, and of a publishing that met files which could not be read or written. It is tried as often as a
  // task.
  absl::Duration retry_backoff = absl::Seconds(1);
  std::function<absl::Status(const PublishRequest&)> publish = PublishJob;
  // Free bytes where an output is.
  std::function<absl::StatusOr<uint64_t>(const std::string&)> free_disk_space = FreeDiskSpace;
  // As JobQueueOptions.settle; a coordinator of one command has no workers that could come back.
  absl::Duration settle = absl::Seconds(30);
  // As JobQueueOptions.bad_input_witnesses; a coordinator of one command takes the word of its own worker.
  size_t bad_input_witnesses = 2;
  // Ended jobs that are older, or more than the newest so many, are deleted, as DeleteJob does.
  absl::Duration keep_jobs_for = absl::InfiniteDuration();
  size_t keep_jobs = SIZE_MAX;
  std::function<void(absl::Status)> on_broken;  // the store failed: end the process
  std::function<void(const std::string&)> log;
};

// Of the ends of jobs whose tasks are done. Thread-safe.
struct PublishMetrics {
  Counter succeeded, failed;
  Histogram seconds{Histogram::Exponential(0.01, 2, 18)};
};

// Thread-safe. Callbacks run on any thread, once, and must not block.
class Coordinator {
 public:
  using JobCallback = JobQueue::JobCallback;

  // Loads the jobs of the store and goes on with those that were not finished, after their sources were looked at again.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Start(CoordinatorOptions options);
  // Waits for work that has begun; callers have stopped calling.
  ~Coordinator();

  void CreateJob(const quern::v1::CreateJobRequest& request, JobCallback done);
  // With the plan.
  void GetJob(uint64_t job, JobCallback done);
  // ResumeJob and RetryJob.
  void ResumeJob(uint64_t job, JobCallback done);
  void DeleteJob(uint64_t job, std::function<void(absl::Status)> done);
  void PlanJob(const quern::v1::JobSpec& spec, std::function<void(absl::StatusOr<Plan>)> done);
  void Inspect(const std::string& path, std::function<void(absl::StatusOr<quern::v1::InspectCheckpointResponse>)> done);

  JobQueue* queue() { return queue_.get(); }
  const PublishMetrics& publish_metrics() const { return publish_metrics_; }
  // What the plan says of a task. Blocks on the store.
  absl::StatusOr<quern::v1::TaskSpec> LoadTask(uint64_t job, uint32_t task);
  // Where a path leads, if it may be read or written.
  absl::StatusOr<std::string> ResolvePath(const std::string& path) const { return options_.paths.Resolve(path); }
  // Ends what waits; later calls are refused.
  void Shutdown();

 private:
  explicit Coordinator(CoordinatorOptions options);

  // Work of clients and jobs, which may take long. After Shutdown `refuse` runs in its place.
  void Schedule(std::function<void()> work, std::function<void(absl::Status)> refuse);
  bool stopping();

  // These block.
  absl::StatusOr<quern::v1::Job> Create(const quern::v1::CreateJobRequest& request);
  absl::StatusOr<quern::v1::Job> CreateForOutput(const quern::v1::CreateJobRequest& request, const quern::v1::JobSpec& spec);
  absl::StatusOr<quern::v1::Job> Add(const quern::v1::CreateJobRequest& request, const quern::v1::JobSpec& spec, uint32_t first_attempt);
  absl::StatusOr<std::optional<quern::v1::Job>> FindFinished(const quern::v1::CreateJobRequest& request, const quern::v1::JobSpec& spec,
                                                             std::optional<uint64_t> existing);
  // `request`: what asks for the job again, if that is why it is resumed.
  absl::StatusOr<quern::v1::Job> Resume(uint64_t job, const quern::v1::CreateJobRequest* request, std::optional<quern::v1::JobSpec> spec);
  // All or nothing, as far as the job is concerned: after an error it is there still, and may be deleted again.
  absl::Status Delete(uint64_t job);
  absl::Status RemovePlacedShards(const quern::store::JobRecord& record);
  void Recheck(uint64_t job);
  void Tick();
  // Deletes the jobs that have expired.
  void Expire(const std::vector<uint64_t>& jobs);
  void Publish(uint64_t job);
  // After an error: whether the job will be published again. If not, `status` tells how often it was tried.
  bool WillPublishAgain(const quern::store::JobRecord& record, absl::Status* status);
  void PublishAgain();
  absl::Status PublishOrVerify(const quern::store::JobRecord& record, std::vector<quern::v1::Mismatch>* mismatches);
  absl::Status CheckIdentity(const quern::v1::JobSpec& spec, const quern::v1::PlanSummary& plan);

  // The spec with its paths resolved and checked.
  absl::StatusOr<quern::v1::JobSpec> CheckSpec(const quern::v1::JobSpec& spec) const;
  // Of QUANTIZE and DEQUANTIZE: the source's real path (else empty), with the paths of files of module inputs resolved.
  absl::StatusOr<std::string> CheckInputs(quern::v1::JobSpec& spec) const;
  // Its real path, if that may be read.
  absl::StatusOr<std::string> CheckSource(const std::string& source) const;
  absl::Status CheckSourceFiles(const quern::v1::PlanSummary& plan) const;
  // A job of the store may be older than the roots: whatever is named by it is judged again before it is read or written.
  absl::Status CheckStoredPath(const std::string& path) const;
  absl::Status CheckStoredOutput(const quern::v1::JobSpec& spec) const;
  absl::Status CheckStoredPaths(const quern::v1::JobSpec& spec, const quern::v1::PlanSummary& plan) const;
  // As JobQueueOptions::confirm.
  absl::Status Confirm(uint64_t job, uint32_t task, quern::v1::FailureReason reason, uint64_t bytes_left);
  absl::StatusOr<quern::v1::PlanSummary> LoadPlan(uint64_t job);
  absl::StatusOr<std::vector<SightProbe>> SightOf(const quern::store::JobRecord& record, const quern::v1::PlanSummary& plan);
  absl::StatusOr<quern::v1::TaskResult> LoadResult(uint64_t job, uint32_t task);
  // Of committed tasks, those that must be done again.
  absl::StatusOr<std::vector<uint32_t>> LostTasks(const quern::store::JobRecord& record);
  // A committed task's report does not fit its plan: says whose it is.
  absl::Status BadReport(uint64_t job, const quern::v1::TaskSpec& task, const absl::Status& what);
  absl::Status Claim(uint64_t job, const quern::v1::JobSpec& spec);
  void ReleaseClaim(uint64_t job);
  absl::Status RemoveLeftovers(const std::string& output);
  absl::StatusOr<quern::v1::Job> Await(std::function<void(JobCallback)> call);
  absl::Status BeginWork(const std::string& output);
  void EndWork(const std::string& output);
  // Whether the job stays held, to be looked at again.
  bool WaitsForFiles(uint64_t job, const absl::Status& status);
  void RecheckWaiting();

  const CoordinatorOptions options_;
  PublishMetrics publish_metrics_;
  Mutex mutex_;
  CondVar work_ended_;
  bool stopping_ QUERN_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, OutputClaim> claims_ QUERN_GUARDED_BY(mutex_);
  // Requests that are being worked on, and the callers that wait for each.
  std::map<std::string, std::vector<JobCallback>> creating_ QUERN_GUARDED_BY(mutex_);
  // Outputs that a request, a recheck or a publish is busy with: one at a time.
  std::set<std::string> busy_ QUERN_GUARDED_BY(mutex_);
  // Held jobs that wait for their files, and until when.
  std::map<uint64_t, absl::Duration> waiting_for_files_ QUERN_GUARDED_BY(mutex_);

  // Jobs whose publishing has failed and is to be tried again. After a restart the count begins anew.
  struct PublishTries {
    uint32_t failures = 0;
    absl::Duration next = absl::InfiniteDuration();  // while one is under way
  };
  std::map<uint64_t, PublishTries> publish_tries_ QUERN_GUARDED_BY(mutex_);

  // Of the ticker's thread.
  absl::Duration last_tick_;
  absl::Duration next_expiry_;
  absl::Time expiry_wall_;
  absl::Duration ages_untrusted_until_ = -absl::InfiniteDuration();

  std::unique_ptr<ThreadPool> short_work_;  // commits of workers
  std::unique_ptr<ThreadPool> reads_;       // of what answers need: not behind a commit that waits for its file to show
  // Of committed files that an audit has confirmed: clients do not wait behind them.
  std::unique_ptr<ThreadPool> read_backs_;
  std::unique_ptr<JobQueue> queue_;
  std::unique_ptr<ThreadPool> long_work_;
  std::unique_ptr<Ticker> ticker_;
  std::unique_ptr<Ticker> recheck_ticker_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_COORDINATOR_H_
