// What a worker knows and wants, as pure logic: the table of attempts, what to tell the coordinator and when, and what its answers mean. It
// does no I/O and reads no clock.
//
// Level-triggered: a request carries every attempt, an answer every attempt that the coordinator wants here. So an attempt that an answer
// does not list is stopped, a start that was lost comes again, and an end is told until it is acknowledged.
//
// One call at a time. A call may wait (a long poll) when its request says nothing new. As soon as there is something to say, a waiting call
// is cancelled and the next one goes out at once. A cancelled call may have carried an answer, so the one after it never waits.
#ifndef QUERN_WORKER_SUPERVISOR_WORKER_STATE_H_
#define QUERN_WORKER_SUPERVISOR_WORKER_STATE_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "quern/v1/executor.pb.h"
#include "quern/v1/workers.pb.h"

namespace quern::worker {

// A worker for one life of its process.
struct WorkerInfo {
  std::string name;         // stable over restarts
  std::string incarnation;  // UUID, new at every start
  std::string host;
  std::string machine;  // as SynchronizeRequest.machine
  std::string version;
  uint64_t numerics_version = 0;
  int slots = 1;
  int threads = 1;
  uint64_t memory = 0;  // bytes of buffer pool per slot
  std::vector<quern::v1::Device> devices;
  // On the monotonic clock: when the machine goes away. Infinite: no limit known.
  absl::Duration available_until = absl::InfiniteDuration();
  std::string reader;       // for attempts whose job does not choose one
  bool data_plane = false;  // its executors have one
};

// Not thread-safe. Every `now` is the monotonic clock's.
class WorkerState {
 public:
  // Bounds of the delay after a failed call; it doubles with every failure in a row.
  static constexpr absl::Duration kMinBackoff = absl::Milliseconds(100);
  static constexpr absl::Duration kMaxBackoff = absl::Seconds(2);
  // Calls with nothing new start at least this far apart, should a coordinator answer waiting calls at once.
  static constexpr absl::Duration kMinInterval = absl::Milliseconds(100);
  // Until the coordinator has told its own.
  static constexpr absl::Duration kDefaultLease = absl::Seconds(10);
  // How long a coordinator that says no `next_call` is expected to hold a call of a busy worker.
  static constexpr absl::Duration kProgressInterval = absl::Seconds(1);
  // A long poll of an idle worker is given up after this: a machine that vanished without a word does not end it.
  static constexpr absl::Duration kLongPoll = absl::Seconds(60);

  explicit WorkerState(WorkerInfo info);

  // --- Calls.

  // When the next call starts, or, while one is out, when to cancel it in favour of another. Infinite: not before an event.
  absl::Duration NextCall() const;
  bool call_out() const { return call_out_; }
  bool call_waits() const { return call_out_ && call_waits_; }
  // The request of a call that starts now; none may be out.
  quern::v1::SynchronizeRequest StartCall(absl::Duration now);
  // How long the call that is out may take.
  absl::Duration CallTimeout() const;

  struct Actions {
    std::vector<quern::v1::StartAttempt> start;  // taken into the table as running
    std::vector<quern::v1::AttemptId> stop;
    std::vector<quern::v1::SightChallenge> challenges;
  };
  // The answer to the call that is out. Specs are moved out of it.
  Actions FinishCall(quern::v1::SynchronizeResponse* response, absl::Duration now);
  // The call that is out failed; running attempts go on, and their ends are kept to be told.
  void FailCall(absl::Duration now);
  // The call that is out was cancelled because NextCall() said so, or waited as long as it may.
  void CancelledCall(absl::Duration now);

  // --- Attempts.

  // An event of an executor. One of an attempt that is unknown or has ended is ignored.
  void OnEvent(quern::v1::AttemptStatus status);
  // The executor of a running attempt is gone, or could not start it. An attempt that was asked to stop ends as STOPPED.
  void OnExecutorFailure(const quern::v1::AttemptId& id, quern::v1::Failure failure);
  void OnSight(quern::v1::SightAnswer answer);

  // --- Leaving.

  // Takes nothing new from now on.
  void Drain();
  // As Drain, and returns the running attempts, which are to be stopped.
  std::vector<quern::v1::AttemptId> StopAll();
  // The coordinator has said STOP.
  bool told_to_stop() const { return told_to_stop_; }
  const std::string& stop_reason() const { return stop_reason_; }
  int running() const { return running_; }
  // Attempts have ended that the coordinator has not acknowledged.
  bool has_ends() const { return attempts_.size() > static_cast<size_t>(running_); }
  // Of them, some are results.
  bool has_results() const;
  // Everything said so far has been answered, and no end waits for its acknowledgement.
  bool all_told() const;

 private:
  using Key = std::tuple<std::string, uint32_t, uint32_t>;
  struct Attempt {
    quern::v1::AttemptStatus status;
    bool stop = false;  // it was asked to stop
    // As the last request listed it; unspecified: no request has.
    quern::v1::AttemptStatus::State told = quern::v1::AttemptStatus::STATE_UNSPECIFIED;
  };

  static Key KeyOf(const quern::v1::AttemptId& id) { return {id.job(), id.task(), id.attempt()}; }
  bool news() const { return changes_ != told_changes_; }
  // How long a call of a busy worker may wait before it is given up for one with renewals and progress.
  absl::Duration RenewInterval() const;
  // The request of the call that is out has told nothing.
  void TakeBackCall();
  // Ends a running attempt of the table.
  void EndAttempt(Attempt* attempt, quern::v1::AttemptStatus status);
  void Stop(Attempt* attempt, std::vector<quern::v1::AttemptId>* stop);
  // Starts `desired` if there is room for it.
  void Consider(quern::v1::DesiredAttempt* desired, Actions* actions);

  const WorkerInfo info_;
  const double spread_;  // of the backoff
  bool self_test_passed_ = true;
  std::map<Key, Attempt> attempts_;
  int running_ = 0;
  bool draining_ = false;
  bool told_to_stop_ = false;
  std::string stop_reason_;

  std::vector<quern::v1::SightAnswer> sight_;  // answers that no call has carried yet
  size_t sight_told_ = 0;                      // of them, in the call that is out
  std::set<std::string> sight_pending_;        // nonces of the challenges taken, until a call has carried the answer

  // Counts what the coordinator must hear at once; `told` is the count in the request of the call that is out, or of the last that
  // succeeded.
  uint64_t changes_ = 1;
  uint64_t told_changes_ = 0;
  uint64_t told_before_ = 0;  // to fall back to when the call that is out fails

  bool call_out_ = false;
  bool call_waits_ = false;
  bool may_wait_ = false;  // the last call succeeded
  absl::Duration call_start_ = -absl::InfiniteDuration();
  absl::Duration next_call_ = -absl::InfiniteDuration();   // with nothing new to say
  absl::Duration not_before_ = -absl::InfiniteDuration();  // after a failure, even with something to say
  absl::Duration backoff_ = absl::ZeroDuration();
  absl::Duration lease_ = kDefaultLease;
  absl::Duration progress_interval_ = kProgressInterval;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_WORKER_STATE_H_
