#include "base/status_macros.h"
#include "client/commands/server_command.h"
#include "client/job_report.h"
#include "client/json_output.h"

namespace quern::client {
namespace {

class ShowCommand : public JobCommand {
 public:
  std::string Name() const override { return "show"; }
  std::string Summary() const override { return "Show one job: state, recipe, errors, and the history of its tasks"; }
  std::string Example() const override { return "quern show jobs/7"; }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, JobName(job()));
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    quern::v1::GetJobRequest request;
    request.set_name(name);
    quern::v1::Job shown;
    QUERN_RETURN_IF_ERROR(
        CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return jobs->GetJob(context, request, &shown); }));
    if (json()) {
      console.out << ToJson(shown);
      return ExitCode::kDone;
    }
    QUERN_ASSIGN_OR_RETURN(const quern::v1::ListTasksResponse tasks, ListAllTasks(*jobs, name, interrupt));
    console.out << FormatJob(shown, tasks);
    return ExitCode::kDone;
  }
};

}  // namespace

std::unique_ptr<Command> NewShowCommand() { return std::make_unique<ShowCommand>(); }

}  // namespace quern::client
