// The coordinator and the worker that one command starts for itself.
#ifndef QUERN_CLIENT_PRIVATE_FARM_H_
#define QUERN_CLIENT_PRIVATE_FARM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/subprocess.h"
#include "client/interrupt.h"
#include "client/runtime_directory.h"
#include "quern/v1/jobs.grpc.pb.h"

namespace quern::client {

// The path of a program of Quern: beside the running one, where the build puts it, then on PATH. NOT_FOUND lists where it was looked for.
absl::StatusOr<std::string> FindProgram(const std::string& name);

// Talks over a unix socket in a private directory. However this process dies, the children end with it. Not thread-safe.
class PrivateFarm {
 public:
  struct Options {
    std::string state_directory;  // empty: the coordinator keeps its state in memory
    bool worker = true;           // false: only questions are asked
    uint64_t memory = 0;          // bytes of buffer pool
    uint32_t threads = 0;
    std::string reader;
    // Paths of the programs; empty: FindProgram.
    std::string coordinator_program;
    std::string worker_program;
  };

  // Blocks until the coordinator answers. Errors hold the end of its log. CANCELLED after an interrupt.
  static absl::StatusOr<std::unique_ptr<PrivateFarm>> Start(const Options& options, Interrupt& interrupt, Clock* clock);
  // Kills what still runs.
  ~PrivateFarm() = default;

  quern::v1::Jobs::Stub& jobs() { return *jobs_; }

  // Looks after the children; call it often. A worker that died is started again, after a pause that grows; with `tasks_done` standing
  // still for too many deaths, and when the coordinator is gone, the error says so. `restarted` is set when a worker was started again, to
  // tell the user.
  absl::Status Check(uint32_t tasks_done, std::string* restarted);

  // How the coordinator ended, when it has: to explain a broken connection. Waits a moment for its end to become visible.
  absl::Status ExplainLostConnection(const absl::Status& status);

  // Asks the worker to finish what it does and to take nothing new; worker_running() tells when it has ended.
  absl::Status DrainWorker();
  bool worker_running();

  // Ends both children, worker first, and waits for them: gently, then after a while with SIGKILL, which a coordinator that keeps its
  // state in memory gets at once. jobs() must not be used afterwards.
  absl::Status Stop();

 private:
  PrivateFarm(Options options, RuntimeDirectory runtime, Clock* clock)
      : options_(std::move(options)), clock_(clock), runtime_(std::move(runtime)) {}

  std::string Address() const;
  std::string LogPath(const std::string& program) const;
  // The last lines of a child's log, set off for an error message; empty when there are none.
  std::string LogTail(const std::string& program) const;
  absl::Status StartCoordinator();
  absl::Status StartWorker();
  absl::Status CoordinatorGone(const ExitState& state) const;
  static absl::Status StopChild(std::optional<Subprocess>& child);
  static absl::Status KillChild(Subprocess& child);

  const Options options_;
  Clock* const clock_;
  RuntimeDirectory runtime_;
  // Destroyed in reverse: the worker goes first.
  std::optional<Subprocess> coordinator_;
  std::optional<Subprocess> worker_;
  std::unique_ptr<quern::v1::Jobs::Stub> jobs_;
  bool draining_ = false;
  int deaths_ = 0;  // of workers since the last finished task
  uint32_t tasks_done_ = 0;
  absl::Duration restart_at_;
  ExitState last_death_;
};

}  // namespace quern::client

#endif  // QUERN_CLIENT_PRIVATE_FARM_H_
