#include "worker/supervisor/executor_process.h"

#include <errno.h>
#include <signal.h>
#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/status_macros.h"
#include "worker/executor/framing.h"

namespace quern::worker {
namespace {

constexpr int kChannelInChild = 3;

}  // namespace

quern::v1::Failure FailureOfDeath(const ExecutorDeath& death, uint64_t memory, const std::string& limit) {
  quern::v1::Failure failure;
  if (death.exit.signaled) failure.set_signal(death.exit.code);
  const std::string pool = FormatByteSize(memory);
  if (death.out_of_memory) {
    failure.set_reason(quern::v1::OUT_OF_MEMORY);
    failure.set_message(absl::StrCat("the OOM killer ended the executor, which had a buffer pool of ", pool, " under ", limit,
                                     ": start the worker with a smaller --memory, or raise the limit"));
  } else {
    failure.set_reason(quern::v1::EXECUTOR_DIED);
    failure.set_message(absl::StrCat("the executor died of ", death.exit.ToString(), ", with a buffer pool of ", pool));
  }
  return failure;
}

absl::StatusOr<std::unique_ptr<ExecutorProcess>> ExecutorProcess::Spawn(Options options) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return ErrnoToStatus(errno, "socketpair", options.argv[0]);
  UniqueFd ours(ends[0]);
  const UniqueFd theirs(ends[1]);
  const timeval timeout = {kSendTimeoutSeconds, 0};
  if (setsockopt(ours.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
    return ErrnoToStatus(errno, "setsockopt", options.argv[0]);
  }
  Subprocess::Options spawn;
  spawn.argv = options.argv;
  spawn.argv.push_back("--executor");
  spawn.argv.push_back(absl::StrCat("--channel-fd=", kChannelInChild));
  spawn.inherited_fds = {{theirs.get(), kChannelInChild}};
  spawn.tie_to_parent = false;  // the channel does that
  QUERN_ASSIGN_OR_RETURN(Subprocess child, Subprocess::Spawn(spawn));
  return std::unique_ptr<ExecutorProcess>(new ExecutorProcess(std::move(options), std::move(child), std::move(ours)));
}

ExecutorProcess::ExecutorProcess(Options options, Subprocess child, UniqueFd channel)
    : options_(std::move(options)),
      oom_kills_before_(options_.oom.Kills()),
      child_(std::move(child)),
      channel_(std::move(channel)),
      reader_([this] { ReadEvents(); }) {}

ExecutorProcess::~ExecutorProcess() {
  if (child_.running()) child_.Kill(SIGKILL).IgnoreError();  // already gone, then
  shutdown(channel_.get(), SHUT_RDWR);
  reader_.join();
}

void ExecutorProcess::ReadEvents() {
  while (true) {
    quern::v1::ExecutorEvent event;
    const absl::StatusOr<bool> more = ReadFrame(channel_.get(), &event);
    if (!more.ok() || !*more) {
      // A child that still lives reads the end of the channel and exits.
      shutdown(channel_.get(), SHUT_RDWR);
      options_.on_closed(more.status());
      return;
    }
    options_.on_event(std::move(*event.mutable_status()));
  }
}

absl::Status ExecutorProcess::Start(quern::v1::StartAttempt start) {
  quern::v1::ExecutorCommand command;
  *command.mutable_start() = std::move(start);
  return WriteFrame(channel_.get(), command);
}

absl::Status ExecutorProcess::Stop(const quern::v1::AttemptId& id) {
  quern::v1::ExecutorCommand command;
  *command.mutable_stop()->mutable_id() = id;
  return WriteFrame(channel_.get(), command);
}

absl::Status ExecutorProcess::Kill() { return child_.Kill(SIGKILL); }

absl::StatusOr<bool> ExecutorProcess::Reap(ExecutorDeath* death) {
  QUERN_ASSIGN_OR_RETURN(const bool ended, child_.Poll(&death->exit));
  death->out_of_memory = ended && death->exit.signaled && death->exit.code == SIGKILL && options_.oom.Kills() > oom_kills_before_;
  return ended;
}

}  // namespace quern::worker
