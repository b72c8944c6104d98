#include "base/status_macros.h"
#include "client/commands/server_command.h"
#include "client/job_report.h"
#include "client/json_output.h"

namespace quern::client {
namespace {

class TasksCommand : public JobCommand {
 public:
  std::string Name() const override { return "tasks"; }
  std::string Summary() const override { return "List the tasks of a job"; }
  std::string Example() const override { return "quern tasks jobs/7"; }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, JobName(job()));
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    QUERN_ASSIGN_OR_RETURN(const quern::v1::ListTasksResponse tasks, ListAllTasks(*jobs, name, interrupt));
    if (json()) {
      console.out << ToJson(tasks);
      return ExitCode::kDone;
    }
    QUERN_ASSIGN_OR_RETURN(const quern::v1::Job shown, GetJob(*jobs, name, interrupt));
    console.out << FormatTasks(tasks) << FormatWaiting(shown);
    return ExitCode::kDone;
  }
};

}  // namespace

std::unique_ptr<Command> NewTasksCommand() { return std::make_unique<TasksCommand>(); }

}  // namespace quern::client
