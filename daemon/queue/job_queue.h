// The queue: jobs, their tasks and attempts, the workers, and every rule by which their states change. It knows neither gRPC nor
// RocksDB: time, storage, blocking work and the check of a finished file are handed in.
//
// States of a job:
//
//   QUEUED --first grant--> RUNNING --last commit--> PUBLISHING --FinishJob--> SUCCEEDED
//      any but SUCCEEDED --FailJob, a task out of attempts, a full disk--> FAILED
//      QUEUED, RUNNING --Pause--> PAUSED          QUEUED, RUNNING, PAUSED, FAILED --Cancel--> CANCELLING --no attempt left--> CANCELLED
//      PAUSED, FAILED, CANCELLING, CANCELLED --Resume--> QUEUED, RUNNING or PUBLISHING
//
// A task is PENDING, RUNNING (it has a granted attempt), COMMITTED or FAILED. An attempt is GRANTED until it is COMMITTED, FAILED (its
// worker said so, or stopped it unasked), LOST (its lease ran out or its worker was replaced) or STOPPED (drained, cancelled or fenced). A
// LOST attempt may still commit, or be taken up again by its worker, while the task is not committed. The first commit fences all others.
//
// Who gets what. A worker with a free slot is served from the job with the highest priority; among equals from the one with the fewest
// attempts running, then from the one served longest ago. From a job it gets, first that applies:
//   - an audit that is due (below);
//   - the first PENDING task that fits its memory and can finish before it leaves. A task whose attempt failed waits (retry_backoff,
//   doubled
//     with each failure), and for a lease after that it goes to another worker than the one it failed on, if there is one. So does one
//     that a worker which leaves gives back, though that is no failure;
//   - when no job has either: a second try (STRAGGLER) at a running task that, by its progress and by how long the job's finished tasks
//   took,
//     would take longer to end than to do again. One second try a task.
// It gets nothing of a job with another numerics version than its own, nothing of a job whose files it neither sees nor can stream, and
// nothing at all while it is cordoned, set aside, draining, or without a device that passed its self-test. A worker is set aside after
// set_aside_after failures in a row, of two tasks at least, while others committed; its name is, until UncordonWorker.
//
// No single worker fails a job. What it reports of the source or of the output's disk (SOURCE_CHANGED, DISK_FULL) fails the job at once if
// `confirm` finds so too, and BAD_INPUT if a worker on another machine has reported that of the task before (where there is none: another
// worker); else it is a failure of that attempt like any other. Of a task's failures on one machine only the first counts while another
// machine could try it, and of those on one worker only the first while another worker could.
//
// Machines. What a worker does wrong is its machine's doing: what is said of "another" worker means one on another machine. Where for
// audit_patience there was none that could, one of another name on the same machine will do, and where there is none either, the same.
// Two workers are on one machine if they report the same one, or have the same name.
//
// Audits. ChosenForAudit names the tasks. Once such a task is committed it is run again by another worker. Its SHA-256 must be the
// committed one, and that of the committed file as it is
// read back: else the job fails with DATA_LOSS, the task counts as not done, and both files stay to be looked at. A job is ready when its
// audits are done too.
//
// Disputes. After a mismatch the job's record names the two workers. ResumeJob decides for the one that is not cordoned or set aside: what
// the other has committed in the job, and no other machine has confirmed, is done again, and what it still runs does not count; what others
// on its machine have committed so far is audited. While neither is, all that the two machines have committed or commit is audited, never
// by the worker itself.
//
// A name belongs to who signed in with it (the principal) until its worker has not been heard of for a lease: others are refused it.
//
// A worker is (name, incarnation). The newest incarnation of a name wins, once: those before it are remembered, and when one of them
// calls again it is told to stop. What it ran is LOST at once. That counts as a failure only if it died: when it had hung up before, or
// has kept silent for a lease. One that is alive, a second worker with the same name, fails no task. A coordinator that restarts takes
// the first incarnation that calls for the newest.
//
// Synced before said: a method changes the state in memory and hands the records to the store; every callback that could tell of a
// change runs only once all records handed over until then are durable. After an error of the store nothing is told any more:
// all callbacks get that error.
#ifndef QUERN_DAEMON_QUEUE_JOB_QUEUE_H_
#define QUERN_DAEMON_QUEUE_JOB_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "daemon/queue/job_store.h"
#include "daemon/queue/pending_tasks.h"
#include "daemon/queue/queue_figures.h"
#include "daemon/queue/task_times.h"
#include "quern/store/store.pb.h"
#include "quern/v1/jobs.pb.h"
#include "quern/v1/plan.pb.h"
#include "quern/v1/workers.pb.h"

namespace quern::daemon {

// A file that workers must see before they get tasks of a job, and the bytes that prove it.
struct SightProbe {
  quern::v1::SightChallenge::What what = quern::v1::SightChallenge::SOURCE;
  std::string path;
  uint64_t size = 0;
  std::vector<uint64_t> offsets;
  std::string samples;    // the bytes at the offsets, up to 4 KiB each
  std::string create_in;  // a directory in which the worker must be able to create files; may be empty
};

// Digest that answers a challenge: SHA-256 over the nonce and the samples in order.
std::string SightDigest(absl::string_view nonce, absl::string_view samples);

struct NewJob {
  uint64_t id = 0;  // of ReserveId
  std::string request_id;
  quern::v1::JobSpec spec;
  int32_t priority = 0;
  quern::v1::PlanSummary plan;
  std::vector<quern::v1::TaskSpec> tasks;
  std::vector<SightProbe> sight;
  // Attempts are counted from here: above the number of every file that an earlier job may have left in the same output.
  uint32_t first_attempt = 1;
  // The result was there already: recorded as SUCCEEDED.
  bool finished = false;
  double audit_fraction = 0;
};

struct ResumeOptions {
  std::vector<SightProbe> sight;
  // Committed tasks whose files are gone: done again.
  std::vector<uint32_t> lost_tasks;
  // Replaces the stored one; only what may change on resume differs.
  std::optional<quern::v1::JobSpec> spec;
  // Asked for anew; with the job's identity. Tasks that passed an audit keep that.
  std::optional<double> audit_fraction;
  std::string identity;
  std::optional<int32_t> priority;
};

struct JobQueueOptions {
  JobStore* store = nullptr;  // outlives the queue
  Clock* clock = nullptr;
  uint64_t numerics_version = 0;
  uint32_t max_failures = 3;
  absl::Duration lease = absl::Seconds(30);  // also the grace of leases after a restart
  // Of these waits up to a quarter is left out, drawn anew for each call: workers that call together do not go on together.
  absl::Duration long_poll = absl::Seconds(20);         // of an idle worker; two thirds of a lease at most
  absl::Duration progress_interval = absl::Seconds(1);  // between calls of a worker that is busy
  // How long an answer waits for the commit of an attempt that the same call reported.
  absl::Duration commit_wait = absl::Seconds(2);
  absl::Duration sight_retry = absl::Seconds(5);
  // After a failure of a task, doubled with each further one up to the second.
  absl::Duration retry_backoff = absl::Seconds(1);
  absl::Duration max_retry_backoff = absl::Minutes(1);
  uint32_t set_aside_after = 5;  // 0: never
  // Workers that must find a task's weights bad (BAD_INPUT) before its job fails for it at once.
  size_t bad_input_witnesses = 2;
  // A task that no worker has memory for fails, but not before workers have had this long to come back after a restart.
  absl::Duration settle = absl::Seconds(30);
  absl::Duration audit_patience = absl::Seconds(30);
  // Tasks that have run for less get no second try.
  absl::Duration straggler_after = absl::Seconds(10);
  // Whether a worker that does not see these files of a job can stream them to and from the coordinator. Unset: it cannot. Called with the
  // queue's mutex held: must neither block nor call the queue.
  std::function<bool(const quern::v1::SynchronizeRequest& worker, uint64_t job, quern::v1::SightChallenge::What what)> can_stream;
  // Removes the file of an audit that passed. May block; runs through `run`.
  std::function<void(const std::string& path)> remove_file;
  // Path of an attempt's file.
  std::function<std::string(const std::string& output, uint32_t task, uint32_t attempt)> attempt_path;
  // Whether the file is what the result says. May block; runs through `run`.
  std::function<absl::Status(const quern::v1::TaskSpec&, const std::string& path, const quern::v1::TaskResult&)> check_commit;
  // Reads the whole file of a task that an audit has confirmed: OK if it has this SHA-256, FAILED_PRECONDITION if it has another,
  // CANCELLED if the coordinator is stopping, and the next one is to ask; anything else says that it cannot be told, and the audit has
  // failed. `done` is to be called once on any thread. Must not block.
  std::function<void(const std::string& path, const std::string& sha256, std::function<void(absl::Status)> done)> read_back;
  // Looks for itself at what a worker reports of a task: whether a source file changed (SOURCE_CHANGED), or whether the disk of the output
  // lacks room for the bytes that the job has still to write (DISK_FULL). `done`, to be called once on any thread: FAILED_PRECONDITION says
  // that it is so, and how; anything else that it is not, or cannot be told. Must not block.
  std::function<void(uint64_t job, uint32_t task, const quern::v1::Failure& reported, uint64_t bytes_left,
                     std::function<void(absl::Status)> done)>
      confirm;
  // Runs blocking work, on another thread or at once; everything given to it must be run before the queue is destroyed.
  std::function<void(std::function<void()>)> run;
  // As `run`, for reads of the store that an answer waits for; unset: `run`.
  std::function<void(std::function<void()>)> run_reads;
  // All tasks of the job are committed: publish it, then call FinishJob or FailJob. Must not block.
  std::function<void(uint64_t job)> on_ready;
  // The store failed: nothing can be promised any more.
  std::function<void(absl::Status)> on_broken;
  // One line for the log.
  std::function<void(const std::string&)> on_event;
};

// Thread-safe. Callbacks run on any thread without locks held, must not block, and may call the queue.
class JobQueue {
 public:
  // Loads what the store holds. Jobs that were QUEUED, RUNNING or PUBLISHING are held until Release: nothing of them is granted or
  // published before their sources have been looked at again.
  static absl::StatusOr<std::unique_ptr<JobQueue>> Open(JobQueueOptions options);
  // Waits for the callbacks of the store and of `run`.
  ~JobQueue();
  JobQueue(const JobQueue&) = delete;
  JobQueue& operator=(const JobQueue&) = delete;

  using JobCallback = std::function<void(absl::StatusOr<quern::v1::Job>)>;

  std::vector<uint64_t> HeldJobs();
  void Release(uint64_t job, std::vector<SightProbe> sight);

  // A number that no job has had. Not durable: a number that never came to a job may be given again after a restart.
  uint64_t ReserveId();
  // Stores the job, its plan and all tasks. It is there as a whole or not at all.
  void AddJob(NewJob job, JobCallback done);
  void GetJob(uint64_t job, JobCallback done);
  // Jobs in order of creation, `after` exclusive; at most `count`.
  void ListJobs(uint64_t after, int count, std::function<void(absl::StatusOr<std::vector<quern::v1::Job>>)> done);
  void PauseJob(uint64_t job, JobCallback done);
  void CancelJob(uint64_t job, JobCallback done);
  // Failures are forgotten and failed tasks get their attempts back. A job that runs is left as it is. FAILED_PRECONDITION when it
  // has succeeded.
  void ResumeJob(uint64_t job, ResumeOptions options, JobCallback done);
  void FailJob(uint64_t job, quern::v1::JobError error, JobCallback done);
  // How long to wait after so many failures of the same thing: retry_backoff, doubled with each further one, up to max_retry_backoff.
  absl::Duration RetryWait(uint32_t failures) const;
  // Of a job that on_ready named.
  void FinishJob(uint64_t job, std::vector<quern::v1::Mismatch> mismatches, JobCallback done);
  // Forgets the job in any state; workers are told to stop what they still run of it.
  void DeleteJob(uint64_t job, std::function<void(absl::Status)> done);
  // Tasks from `first`, at most `count`, with the history of their attempts. Reads the store through `run`.
  void ListTasks(uint64_t job, uint32_t first, int count, std::function<void(absl::StatusOr<std::vector<quern::v1::Task>>)> done);
  std::vector<quern::v1::Worker> ListWorkers();

  using WorkerCallback = std::function<void(absl::StatusOr<quern::v1::Worker>)>;
  // Cordon and what set it aside are kept by name, over restarts of worker and coordinator; draining is of one process.
  void CordonWorker(const std::string& name, const std::string& reason, WorkerCallback done);
  void UncordonWorker(const std::string& name, WorkerCallback done);
  void DrainWorker(const std::string& name, WorkerCallback done);

  // Looks at every job and worker once.
  QueueFigures Figures();

  // Ended jobs, oldest end first, that ended before `before` or that are more than the newest `count`.
  std::vector<uint64_t> ExpiredJobs(absl::Time before, size_t count);

  // Grows with every change of the job; 0 when there is no such job.
  uint64_t Revision(uint64_t job);
  std::optional<quern::store::JobRecord> Record(uint64_t job);
  bool IsHeld(uint64_t job);
  // Latest job with that request id, or for that output.
  std::optional<uint64_t> FindByRequestId(const std::string& request_id);
  std::optional<uint64_t> FindByOutput(const std::string& output);
  struct CommittedAttempt {
    uint32_t task = 0;
    uint32_t attempt = 0;
    std::string label;
    uint64_t size = 0;  // bytes of the file
  };
  // Committed tasks that have a file, in order.
  std::vector<CommittedAttempt> CommittedAttempts(uint64_t job);
  struct LiveAttempt {
    std::string path;           // of its file; empty when the task has none
    bool sends_output = false;  // over the data plane, as it was told with its grant
    std::string principal;      // of the worker that holds it, as Synchronize has it; empty: not known, or nobody was asked
  };
  // An attempt that may still commit and is not to stop; any thread may ask, often.
  std::optional<LiveAttempt> FindLiveAttempt(uint64_t job, uint32_t task, uint32_t attempt);
  // One above the number of every attempt of the job.
  uint32_t NextAttempt(uint64_t job);

  // The protocol of workers. `done` is called once: at once, after the long poll, or with ABORTED when a newer call of the same worker
  // takes its place. `ticket` names the call for CancelSynchronize, which ends it with CANCELLED if it still waits. `principal` is whom the
  // caller has shown to be, the same after certificates and tokens were renewed; empty: nobody was asked, and all are trusted.
  // PERMISSION_DENIED when the name belongs to another.
  void Synchronize(const quern::v1::SynchronizeRequest& request, const std::string& principal, uint64_t ticket,
                   std::function<void(absl::StatusOr<quern::v1::SynchronizeResponse>)> done);
  void CancelSynchronize(uint64_t ticket);

  // Ends leases, waits of tasks and long polls whose time has come. To be called a few times a second.
  void Tick();
  // Every lease begins anew: for a coordinator that has just noticed that it did not run for a while, and heard nobody.
  void GrantGrace();
  // Ends all waiting calls with UNAVAILABLE and refuses new ones.
  void Shutdown();

 private:
  struct AttemptRef {
    uint64_t job;
    uint32_t task;
    uint32_t attempt;
    bool operator<(const AttemptRef& other) const { return std::tie(job, task, attempt) < std::tie(other.job, other.task, other.attempt); }
  };

  // Who ran something. What is older than `machine` does not say where; then names alone tell workers apart.
  struct Runner {
    std::string worker;
    std::string machine;
    bool operator<(const Runner& other) const { return std::tie(worker, machine) < std::tie(other.worker, other.machine); }
  };
  // How far apart two workers are.
  enum class Distance { kSameWorker, kSameMachine, kOtherMachine };

  // GRANTED or LOST.
  struct Attempt {
    quern::store::AttemptRecord record;
    absl::Duration deadline;
    absl::Duration granted_at;  // or loaded
    // Granted or renewed since this coordinator started: its death is one that we have seen.
    bool seen_alive = false;
    bool stop = false;
    std::string stop_reason;
    uint64_t bytes_read = 0;
    uint64_t bytes_written = 0;
  };

  struct TaskState {
    quern::store::TaskRecord record;
    std::map<uint32_t, Attempt> attempts;
  };

  // Failures of a task since this coordinator started.
  struct Trouble {
    absl::Duration not_before = -absl::InfiniteDuration();  // of its next grant
    absl::Duration avoid_until = -absl::InfiniteDuration();
    std::set<Runner> failed_on;     // they are avoided until then
    std::set<Runner> bad_input_on;  // they reported BAD_INPUT
    bool second_try_failed = false;
    std::set<std::string> given_back_by;  // machines, or workers where these are not known, that left
    uint32_t given_back = 0;              // by one of them again
  };

  // Sums over the tasks.
  struct Totals {
    uint64_t to_read = 0, to_write = 0;
    uint64_t read = 0, written = 0;  // of committed tasks, as all below
    double sum_squared_error = 0, sum_squares = 0, max_abs_error = 0, worst_relative_error = 0;
    std::string worst_module;
  };

  struct JobState {
    quern::store::JobRecord record;
    std::vector<TaskState> tasks;
    uint32_t count[quern::v1::Task::State_ARRAYSIZE] = {};  // of tasks, by state
    PendingTasks pending;                                   // PENDING and not delayed
    std::set<std::pair<absl::Duration, uint32_t>> delayed;  // PENDING, with the time from which on they may be granted
    std::map<uint32_t, Trouble> trouble;
    std::set<uint32_t> live;                    // tasks with attempts in memory
    uint32_t granted = 0;                       // attempts that are GRANTED
    std::set<uint32_t> stragglers;              // tasks that are worth a second try now
    std::map<uint32_t, absl::Duration> audits;  // committed tasks whose audit is due and not under way, since when
    uint32_t audits_left = 0, audits_passed = 0;
    Totals totals;
    uint64_t next_sequence = 1;
    uint64_t revision = 0;
    uint64_t last_served = 0;
    bool held = false;
    std::vector<SightProbe> sight;
    TaskTimes times;
    std::string waits_for;  // as it was when it was looked at last
  };

  enum class Sight { kAsked, kSeen, kBlind };
  struct SightState {
    Sight state = Sight::kAsked;
    std::string nonce;
    std::string expected;
    absl::Duration time;  // of the question or of the bad answer
  };

  struct Waiter {
    uint64_t ticket;
    absl::Duration deadline;
    std::function<void(absl::StatusOr<quern::v1::SynchronizeResponse>)> done;
  };

  // An attempt of a superseded incarnation that may have died of it.
  struct Suspicion {
    AttemptRef ref;
    uint64_t memory_before = 0;  // TaskRecord.memory_limit, to return to when the incarnation is alive
    std::string message;
  };

  struct Superseded {
    std::string incarnation;
    std::optional<std::string> principal;
    absl::Duration dead_at;  // it has died if it has not called until then
    bool told = false;
    std::vector<Suspicion> suspicions;
  };

  struct WorkerState {
    quern::v1::SynchronizeRequest info;    // the last call, with the attempts that it listed
    std::optional<std::string> principal;  // who called; not known of one that only the records of attempts tell of, if they are old
    std::string refused;                   // the incarnation that was refused the name last
    std::deque<Superseded> superseded;     // incarnations before this one, oldest first
    absl::Time here_since;                 // first call of this incarnation
    bool hung_up = false;                  // its last call ended from its side, and no other has come
    absl::Duration last_seen;
    absl::Time last_seen_wall;
    absl::Duration available_until = absl::InfiniteDuration();
    bool lost = false;
    quern::store::WorkerRecord standing;
    uint32_t failures_in_a_row = 0;
    std::set<std::pair<uint64_t, uint32_t>> failed_tasks;  // of these failures
    uint64_t commits_before = 0;                           // of all workers, when they began
    double seconds_per_byte = 0;                           // of its last tasks; 0: not known
    uint64_t rated_job = 0;                                // whose tasks these were
    std::set<AttemptRef> granted;
    std::set<AttemptRef> told_to_stop;
    std::map<std::pair<uint64_t, int>, SightState> sight;  // by job and SightChallenge::What
    std::optional<Waiter> waiter;
    uint64_t waiter_order = 0;
  };

  // A job on its way into the store.
  struct Adding {
    NewJob add;
    JobState job;
    std::vector<StoreWrite> records;  // of tasks
    JobCallback done;
  };

  // How a worker gets at the files of a job.
  struct Access {
    bool possible = true;
    bool fetch_source = false;
    bool send_output = false;
  };

  // A grant whose TaskSpec is still to be read.
  struct SpecToLoad {
    int index;  // in the response
    AttemptRef ref;
  };

  // Holds the mutex; at its end waiting workers are looked at again, the records go to the store, and what is to be said is said.
  class QUERN_SCOPED_CAPABILITY Section {
   public:
    explicit Section(JobQueue* queue) QUERN_ACQUIRE(queue->mutex_);
    ~Section() QUERN_RELEASE();

   private:
    JobQueue* const queue_;
  };

  explicit JobQueue(JobQueueOptions options);
  absl::Status Load();

  // Says something once all records of now are durable.
  void Say(std::function<void(absl::Status)> what) QUERN_REQUIRES(mutex_);
  void Put(std::string key, std::string value) QUERN_REQUIRES(mutex_);
  void PutJob(JobState& job) QUERN_REQUIRES(mutex_);
  void PutTask(JobState& job, uint32_t task) QUERN_REQUIRES(mutex_);
  void PutAttempt(const AttemptRef& ref, const quern::store::AttemptRecord& record) QUERN_REQUIRES(mutex_);
  void Flush() QUERN_REQUIRES(mutex_);
  void OnStored(uint64_t sequence, absl::Status status);
  void Run(std::function<void()> work) QUERN_REQUIRES(mutex_);
  void RunReads(std::function<void()> work) QUERN_REQUIRES(mutex_);
  void RunDone();
  void Log(std::string line) QUERN_REQUIRES(mutex_);

  // Writes the specs that are left, some at a time, and then the job.
  void AddSpecs(std::shared_ptr<Adding> adding);
  JobState* FindJob(uint64_t id) QUERN_REQUIRES(mutex_);
  Attempt* FindAttempt(const AttemptRef& ref) QUERN_REQUIRES(mutex_);
  quern::v1::Job Snapshot(const JobState& job) const QUERN_REQUIRES(mutex_);
  void SayJob(const JobState& job, JobCallback done) QUERN_REQUIRES(mutex_);
  void SayError(absl::Status status, JobCallback done) QUERN_REQUIRES(mutex_);
  void Changed(JobState& job) QUERN_REQUIRES(mutex_);
  static bool Schedulable(const JobState& job);
  static bool HasGranted(const TaskState& task);
  // Everything is committed, and audited as far as it is to be.
  static bool Complete(const JobState& job);
  // The waiting call of the worker may have an answer now.
  void NewsFor(const std::string& worker) QUERN_REQUIRES(mutex_);

  // These keep the indexes of JobState, and write nothing. A task that is PENDING already is put where it belongs now.
  void MoveTask(JobState& job, uint32_t task, quern::v1::Task::State state) QUERN_REQUIRES(mutex_);
  void SetAttemptState(JobState& job, Attempt& attempt, quern::v1::Attempt::State state) QUERN_REQUIRES(mutex_);
  void SetAudit(JobState& job, uint32_t task, quern::store::TaskRecord::Audit audit) QUERN_REQUIRES(mutex_);
  // Whether the audit of the task waits for a worker, as JobState.audits has it.
  void IndexAudit(JobState& job, uint32_t task) QUERN_REQUIRES(mutex_);
  static void AddTask(JobState& job, quern::store::TaskRecord record);
  static void AddToTotals(const quern::store::TaskRecord& task, Totals* totals);
  void CountTotals(JobState& job) QUERN_REQUIRES(mutex_);
  // Its result is not good any more. CountTotals is left to the caller: it goes over all tasks.
  void Uncommit(JobState& job, uint32_t task, quern::v1::Task::State state) QUERN_REQUIRES(mutex_);
  // What somebody has to do so that something of the job runs; empty where that is nothing.
  std::string WaitsFor(const JobState& job) const QUERN_REQUIRES(mutex_);
  // Whoever watches the job hears of what it waits for, though nothing has happened to it.
  void NoteWaiting(JobState& job) QUERN_REQUIRES(mutex_);
  void AddDispute(JobState& job, const Runner& worker, const Runner& other) QUERN_REQUIRES(mutex_);
  // Whether it, or another on its machine, is in a dispute.
  static bool IsDisputed(const JobState& job, const Runner& runner);
  // On resume: does again or audits what workers in a dispute have committed.
  void SettleDisputes(JobState& job) QUERN_REQUIRES(mutex_);
  // How much else the two have committed, for the message of a mismatch in the task.
  std::string DescribeDispute(const JobState& job, uint32_t task, const std::string& worker, const std::string& other) const
      QUERN_REQUIRES(mutex_);

  void SetState(JobState& job, quern::v1::Job::State state) QUERN_REQUIRES(mutex_);
  void MakeReady(JobState& job) QUERN_REQUIRES(mutex_);
  void StopAttempts(JobState& job, const std::string& reason) QUERN_REQUIRES(mutex_);
  void Fail(JobState& job, quern::v1::JobError error) QUERN_REQUIRES(mutex_);
  void FailTask(JobState& job, uint32_t task, const std::string& reason, const std::string& message) QUERN_REQUIRES(mutex_);
  static uint64_t BytesLeft(const JobState& job);
  void FailFullDisk(JobState& job, uint32_t task, const quern::v1::Failure& failure) QUERN_REQUIRES(mutex_);
  void EndAttempt(const AttemptRef& ref, quern::v1::Attempt::State state, const std::string& reason, const std::string& message)
      QUERN_REQUIRES(mutex_);
  // Whether the loss is a failure, should its worker have died.
  bool LoseAttempt(const AttemptRef& ref, const std::string& message) QUERN_REQUIRES(mutex_);
  // What a worker reports: looks at it if need be.
  void HandleFailure(const AttemptRef& ref, const quern::v1::Failure& failure) QUERN_REQUIRES(mutex_);
  void HandleFailure(const AttemptRef& ref, quern::v1::FailureReason reason, std::string message) QUERN_REQUIRES(mutex_);
  void FinishLook(const AttemptRef& ref, quern::v1::Failure failure, const absl::Status& found);
  // `is_so`: it is not the attempt alone that met it.
  void EndFailed(const AttemptRef& ref, const quern::v1::Failure& failure, bool is_so) QUERN_REQUIRES(mutex_);
  void CountFailure(JobState& job, uint32_t task, const std::string& reason, const std::string& message) QUERN_REQUIRES(mutex_);
  bool HalveMemory(TaskState& task, uint64_t used) QUERN_REQUIRES(mutex_);
  // Of an attempt that `worker` says it has run.
  void HandleCompletion(const AttemptRef& ref, const quern::v1::SynchronizeRequest& worker, const quern::v1::TaskResult& result)
      QUERN_REQUIRES(mutex_);
  // Of a task that has another result: `runner` did run the attempt, and came to other bytes.
  void FinishContradiction(const AttemptRef& ref, const Runner& runner, const std::string& sha256) QUERN_REQUIRES(mutex_);
  void FinishCheck(const AttemptRef& ref, const std::string& worker, const quern::v1::TaskResult& result, std::string result_text,
                   const absl::Status& status);
  // `result_text`: the result as it is stored.
  void Commit(const AttemptRef& ref, const quern::v1::TaskResult& result, std::string result_text) QUERN_REQUIRES(mutex_);
  // The job may be ready, or cancelled.
  void EndOfAttempts(JobState& job) QUERN_REQUIRES(mutex_);
  // Of an audit whose own file is well.
  void CompareAudit(const AttemptRef& ref, const quern::v1::TaskResult& result) QUERN_REQUIRES(mutex_);
  void FinishReadBack(const AttemptRef& ref, const quern::v1::TaskResult& result, const absl::Status& stored) QUERN_EXCLUDES(mutex_);
  void PassAudit(const AttemptRef& ref, const quern::v1::TaskResult& result) QUERN_REQUIRES(mutex_);
  // Its worker did well, though what it was to confirm is not what was stored.
  void EndRightAudit(const AttemptRef& ref, const quern::v1::TaskResult& result) QUERN_REQUIRES(mutex_);
  // The committed file is not what its worker has reported, though an audit by `auditor` confirms that.
  void FailStored(JobState& job, uint32_t task, const std::string& auditor, const absl::Status& stored) QUERN_REQUIRES(mutex_);
  // `attempt` of `runner` came to other bytes than those that are committed.
  void FailMismatch(JobState& job, uint32_t task, uint32_t attempt, const Runner& runner, const std::string& sha256) QUERN_REQUIRES(mutex_);
  // Opens a dispute of the two, or of one with itself, takes the committed result back and fails the job; of one that has succeeded only
  // the log tells. The message is `what`, and what to do.
  void FailForDataLoss(JobState& job, uint32_t task, uint32_t attempt, const Runner& worker, const Runner& other, const std::string& what)
      QUERN_REQUIRES(mutex_);
  // Ends all attempts of the task; `winner` as COMMITTED, others as fenced.
  void EndAttempts(const AttemptRef& winner, const quern::v1::TaskResult& result, uint64_t commit_sequence) QUERN_REQUIRES(mutex_);
  // What the end of one of its attempts says of a worker.
  void WorkerSucceeded(const std::string& name, const AttemptRef& ref, const quern::v1::TaskResult& result) QUERN_REQUIRES(mutex_);
  void WorkerFailed(const std::string& name, const AttemptRef& ref, const std::string& message) QUERN_REQUIRES(mutex_);
  void NoteTrouble(JobState& job, uint32_t task, const Runner& runner, uint32_t failures) QUERN_REQUIRES(mutex_);
  // A worker that leaves has not finished the attempt: no failure, but a task that one machine gives back again and again waits like one
  // that fails.
  void NoteGivenBack(const AttemptRef& ref) QUERN_REQUIRES(mutex_);

  // A call of a new incarnation: what the old one ran is lost, and whoever waits for it is told to stop.
  void Supersede(WorkerState& worker, const quern::v1::SynchronizeRequest& request) QUERN_REQUIRES(mutex_);
  // Whether the name is another's now.
  static bool BelongsToAnother(const WorkerState& worker, const std::string& principal);
  absl::Status RefuseName(WorkerState& worker, const quern::v1::SynchronizeRequest& request, const std::string& principal)
      QUERN_REQUIRES(mutex_);
  void AnswerSuperseded(const WorkerState& worker, Superseded& old, const quern::v1::SynchronizeRequest& request,
                        std::function<void(absl::StatusOr<quern::v1::SynchronizeResponse>)> done) QUERN_REQUIRES(mutex_);
  void ForgiveSuspicions(Superseded& old) QUERN_REQUIRES(mutex_);
  void CountSuspicions(Superseded& old) QUERN_REQUIRES(mutex_);
  // Whether a failure of the task has consequences now.
  bool CountsFailures(const AttemptRef& ref) QUERN_REQUIRES(mutex_);
  void UpdateWorker(WorkerState& worker, const quern::v1::SynchronizeRequest& request) QUERN_REQUIRES(mutex_);
  // What the call says of attempts; returns those that it lists. `current` is null for a superseded incarnation, which takes up nothing.
  std::set<AttemptRef> HandleAttempts(const quern::v1::SynchronizeRequest& request, WorkerState* current) QUERN_REQUIRES(mutex_);
  void HandleSight(WorkerState& worker, const quern::v1::SightAnswer& answer) QUERN_REQUIRES(mutex_);
  // Whether the file of an attempt that the worker reported is being looked at.
  bool IsChecking(const WorkerState& worker) const QUERN_REQUIRES(mutex_);
  void AnswerWorker(WorkerState& worker, bool even_without_news) QUERN_REQUIRES(mutex_);
  void AnswerWaiters() QUERN_REQUIRES(mutex_);
  // Goes through the calls of workers with room for more, in the order in which they came, while there is something to be had.
  void OfferWork() QUERN_REQUIRES(mutex_);
  bool HasOffer() const QUERN_REQUIRES(mutex_);
  void IndexWaiter(const WorkerState& worker) QUERN_REQUIRES(mutex_);
  void RemoveWaiter(WorkerState& worker) QUERN_REQUIRES(mutex_);
  static int64_t FreeSlots(const WorkerState& worker);
  bool BuildAnswer(WorkerState& worker, quern::v1::SynchronizeResponse* response, std::vector<SpecToLoad>* specs) QUERN_REQUIRES(mutex_);
  bool AddGrants(WorkerState& worker, quern::v1::SynchronizeResponse* response, std::vector<SpecToLoad>* specs) QUERN_REQUIRES(mutex_);
  // One grant of the job, or none.
  bool GrantFrom(WorkerState& worker, JobState& job, const Access& access, quern::v1::SynchronizeResponse* response,
                 std::vector<SpecToLoad>* specs) QUERN_REQUIRES(mutex_);
  bool GrantSecondTry(WorkerState& worker, JobState& job, const Access& access, quern::v1::SynchronizeResponse* response,
                      std::vector<SpecToLoad>* specs) QUERN_REQUIRES(mutex_);
  Access ProveSight(WorkerState& worker, const JobState& job, quern::v1::SynchronizeResponse* response, bool* news) QUERN_REQUIRES(mutex_);
  double SecondsFor(const WorkerState& worker, const JobState& job, const quern::store::TaskRecord& task) const QUERN_REQUIRES(mutex_);
  bool CanFinish(const WorkerState& worker, const JobState& job, const quern::store::TaskRecord& task) const QUERN_REQUIRES(mutex_);
  // Why the worker, however busy it is, cannot run the task; nullptr: it could.
  const char* WhyNot(const WorkerState& worker, const JobState& job, const quern::store::TaskRecord& task) const QUERN_REQUIRES(mutex_);
  bool CouldRun(const WorkerState& worker, const JobState& job, const quern::store::TaskRecord& task) const QUERN_REQUIRES(mutex_);
  static Runner RunnerOf(const WorkerState& worker) { return {worker.info.worker(), worker.info.machine()}; }
  static Runner RunnerOf(const quern::store::AttemptRecord& attempt) { return {attempt.worker(), attempt.machine()}; }
  static Runner CommitterOf(const quern::store::TaskRecord& task) { return {task.committed_by(), task.committed_on()}; }
  static Distance DistanceOf(const Runner& a, const Runner& b);
  // To the nearest.
  static Distance DistanceOf(const Runner& runner, const std::set<Runner>& others);
  // Whether there is a worker that could run the task and is farther from all of `others` than that.
  bool FartherCouldRun(const JobState& job, uint32_t task, const std::set<Runner>& others, Distance than) const QUERN_REQUIRES(mutex_);
  // Whether the task has failed on the worker, or near it, and one farther from where it did could run it.
  bool FailedNear(const JobState& job, uint32_t task, const Runner& runner) const QUERN_REQUIRES(mutex_);
  bool IsAvoided(const WorkerState& worker, const JobState& job, uint32_t task) const QUERN_REQUIRES(mutex_);
  bool MayAudit(const WorkerState& worker, const JobState& job, uint32_t task, absl::Duration due) const QUERN_REQUIRES(mutex_);
  void FailTasksThatNobodyHasMemoryFor(const WorkerState& worker, JobState& job) QUERN_REQUIRES(mutex_);
  void FindStragglers(JobState& job) QUERN_REQUIRES(mutex_);
  void Grant(WorkerState& worker, JobState& job, uint32_t task, quern::v1::Purpose purpose, const Access& access,
             quern::v1::SynchronizeResponse* response, std::vector<SpecToLoad>* specs) QUERN_REQUIRES(mutex_);
  void AddDesired(JobState& job, const AttemptRef& ref, const Attempt& attempt, bool with_spec, quern::v1::SynchronizeResponse* response,
                  std::vector<SpecToLoad>* specs) QUERN_REQUIRES(mutex_);
  // Why it gets nothing of any job now; empty: it does.
  std::string NotReady(const WorkerState& worker) const QUERN_REQUIRES(mutex_);
  // Why it can be of no use as it is; empty: it can.
  std::string CannotWork(const WorkerState& worker) const QUERN_REQUIRES(mutex_);
  bool IsDraining(const WorkerState& worker) const QUERN_REQUIRES(mutex_);
  void PutWorker(const WorkerState& worker) QUERN_REQUIRES(mutex_);
  // As quern.v1.Worker.state.
  const char* StateOf(const WorkerState& worker) const QUERN_REQUIRES(mutex_);
  quern::v1::Worker DescribeWorker(const std::string& name, const WorkerState& worker) const QUERN_REQUIRES(mutex_);
  void ChangeWorker(const std::string& name, const std::function<void(WorkerState&)>& change, WorkerCallback done);
  absl::StatusOr<quern::v1::TaskSpec> LoadSpec(const AttemptRef& ref);

  // For the figures: the end of an attempt, and a result that was taken.
  void CountEnd(quern::v1::Attempt::State state, const std::string& reason) QUERN_REQUIRES(mutex_);
  void CountResult(const quern::v1::TaskResult& result) QUERN_REQUIRES(mutex_);

  const JobQueueOptions options_;

  Mutex mutex_;
  CondVar idle_;
  std::map<uint64_t, JobState> jobs_ QUERN_GUARDED_BY(mutex_);
  std::map<std::string, WorkerState> workers_ QUERN_GUARDED_BY(mutex_);
  std::set<AttemptRef> checking_ QUERN_GUARDED_BY(mutex_);
  uint64_t next_job_ QUERN_GUARDED_BY(mutex_) = 1;
  uint64_t revision_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t next_waiter_ QUERN_GUARDED_BY(mutex_) = 1;
  std::set<uint64_t> active_ QUERN_GUARDED_BY(mutex_);                     // jobs that have not ended
  std::map<uint64_t, std::string> waiters_ QUERN_GUARDED_BY(mutex_);       // order of arrival -> worker
  std::map<uint64_t, std::string> idle_waiters_ QUERN_GUARDED_BY(mutex_);  // of them, those with a free slot
  std::unordered_map<uint64_t, std::string> tickets_ QUERN_GUARDED_BY(mutex_);
  // Which waiting calls are to be looked at when the section ends.
  bool news_for_all_ QUERN_GUARDED_BY(mutex_) = false;
  std::set<std::string> news_for_ QUERN_GUARDED_BY(mutex_);
  bool work_arrived_ QUERN_GUARDED_BY(mutex_) = false;
  QueueCounts counts_ QUERN_GUARDED_BY(mutex_);
  Histogram job_seconds_{Histogram::Exponential(1, 2, 18)};
  Histogram task_seconds_{Histogram::Exponential(0.125, 2, 18)};
  uint64_t grants_ QUERN_GUARDED_BY(mutex_) = 0;   // since the start
  uint64_t commits_ QUERN_GUARDED_BY(mutex_) = 0;  // since the start
  absl::Duration settled_at_ QUERN_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
  absl::Duration next_chores_ QUERN_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
  bool shut_down_ QUERN_GUARDED_BY(mutex_) = false;
  absl::Status broken_ QUERN_GUARDED_BY(mutex_);
  std::mt19937_64 random_ QUERN_GUARDED_BY(mutex_);

  // Of the current section.
  std::vector<StoreWrite> writes_ QUERN_GUARDED_BY(mutex_);
  std::vector<std::function<void(absl::Status)>> to_say_ QUERN_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> after_unlock_ QUERN_GUARDED_BY(mutex_);

  uint64_t handed_over_ QUERN_GUARDED_BY(mutex_) = 0;  // batches given to the store
  uint64_t durable_ QUERN_GUARDED_BY(mutex_) = 0;
  std::multimap<uint64_t, std::function<void(absl::Status)>> unsaid_ QUERN_GUARDED_BY(mutex_);
  int outside_ QUERN_GUARDED_BY(mutex_) = 0;  // callbacks of the store and of `run` that are still to come
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_JOB_QUEUE_H_
