#include "base/status_macros.h"
#include "client/commands/server_command.h"

namespace quern::client {
namespace {

class WatchCommand : public JobCommand {
 public:
  std::string Name() const override { return "watch"; }
  std::string Summary() const override { return "Follow a job until it has ended; exits as the job does"; }
  std::string Example() const override { return "quern watch jobs/7"; }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, JobName(job()));
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    QUERN_ASSIGN_OR_RETURN(const quern::v1::Job watched, GetJob(*jobs, name, interrupt));
    return WatchAndReport(*jobs, watched, interrupt, json(), console);
  }
};

}  // namespace

std::unique_ptr<Command> NewWatchCommand() { return std::make_unique<WatchCommand>(); }

}  // namespace quern::client
