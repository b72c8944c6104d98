// What every command is: options, then a run. One file a command in this directory.
#ifndef QUERN_CLIENT_COMMANDS_COMMAND_H_
#define QUERN_CLIENT_COMMANDS_COMMAND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/console.h"
#include "client/exit_code.h"

namespace CLI {
class App;
}

namespace quern::client {

class Command {
 public:
  virtual ~Command() = default;
  virtual std::string Name() const = 0;
  virtual std::string Summary() const = 0;  // one line of the list of commands
  virtual std::string Example() const = 0;  // a command line that could be typed
  virtual void AddOptions(CLI::App& app) = 0;
  // Blocks. Prints results to console.out: JSON alone where `json()`, and nothing else there. Called once, after the options are parsed.
  virtual absl::StatusOr<ExitCode> Run(Console& console) = 0;

  bool json() const { return json_; }
  bool* mutable_json() { return &json_; }

 private:
  bool json_ = false;
};

std::unique_ptr<Command> NewQuantizeCommand();
std::unique_ptr<Command> NewDequantizeCommand();
std::unique_ptr<Command> NewPlanCommand();
std::unique_ptr<Command> NewInspectCommand();
std::unique_ptr<Command> NewVerifyCommand();
std::unique_ptr<Command> NewSynthCommand();
std::unique_ptr<Command> NewSubmitCommand();
std::unique_ptr<Command> NewJobsCommand();
std::unique_ptr<Command> NewShowCommand();
std::unique_ptr<Command> NewTasksCommand();
std::unique_ptr<Command> NewWatchCommand();
std::unique_ptr<Command> NewCancelCommand();
std::unique_ptr<Command> NewPauseCommand();
std::unique_ptr<Command> NewResumeCommand();
std::unique_ptr<Command> NewRetryCommand();
std::unique_ptr<Command> NewDeleteCommand();
std::unique_ptr<Command> NewWorkersCommand();
std::unique_ptr<Command> NewCordonCommand();
std::unique_ptr<Command> NewUncordonCommand();
std::unique_ptr<Command> NewDrainCommand();

}  // namespace quern::client

#endif  // QUERN_CLIENT_COMMANDS_COMMAND_H_
