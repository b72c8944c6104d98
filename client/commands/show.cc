#include <optional>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
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
  std::string Example() const override { return "quern show jobs/7 --task 24"; }

  void AddOptions(CLI::App& app) override {
    JobCommand::AddOptions(app);
    app.add_option("--task", task_, "Show this task alone: every attempt with its worker, times, stages, reason and message")
        ->type_name("N");
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, JobName(job()));
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    if (task_.has_value()) return ShowTask(*jobs, name, interrupt, console);
    QUERN_ASSIGN_OR_RETURN(const quern::v1::Job shown, GetJob(*jobs, name, interrupt));
    if (json()) {
      console.out << ToJson(shown);
      return ExitCode::kDone;
    }
    QUERN_ASSIGN_OR_RETURN(const quern::v1::ListTasksResponse tasks, ListAllTasks(*jobs, name, interrupt));
    console.out << FormatJob(shown, tasks);
    return ExitCode::kDone;
  }

 private:
  absl::StatusOr<ExitCode> ShowTask(quern::v1::Jobs::Stub& jobs, const std::string& job, Interrupt& interrupt, Console& console) const {
    QUERN_ASSIGN_OR_RETURN(const quern::v1::ListTasksResponse tasks, ListAllTasks(jobs, job, interrupt));
    if (*task_ >= static_cast<uint32_t>(tasks.tasks_size())) {
      return absl::NotFoundError(absl::StrCat(job, " has no task ", *task_, ": there are ", tasks.tasks_size(), ", counted from 0"));
    }
    const quern::v1::Task& task = tasks.tasks(static_cast<int>(*task_));
    console.out << (json() ? ToJson(task) : FormatTask(task));
    return ExitCode::kDone;
  }

  std::optional<uint32_t> task_;
};

}  // namespace

std::unique_ptr<Command> NewShowCommand() { return std::make_unique<ShowCommand>(); }

}  // namespace quern::client
