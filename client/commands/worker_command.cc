#include "client/commands/worker_command.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text_check.h"
#include "client/exit_code.h"
#include "client/json_output.h"

namespace quern::client {
namespace {

class WorkerChangeCommand : public ServerCommand {
 public:
  WorkerChangeCommand(std::string name, std::string summary, WorkerReason takes_reason, WorkerCall call)
      : name_(std::move(name)), summary_(std::move(summary)), takes_reason_(takes_reason), call_(std::move(call)) {}

  std::string Name() const override { return name_; }
  std::string Summary() const override { return summary_; }
  std::string Example() const override {
    return absl::StrCat("quern ", name_, " node7", takes_reason_ == WorkerReason::kTaken ? " --reason \"new disk\"" : "");
  }

  void AddOptions(CLI::App& app) override {
    app.add_option("worker", worker_, "The worker: workers/node7, or node7")->required()->type_name("WORKER");
    if (takes_reason_ == WorkerReason::kTaken) app.add_option("--reason", reason_, "Shown by quern workers")->type_name("TEXT");
    ServerCommand::AddOptions(app);
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, WorkerName(worker_));
    if (const absl::Status reason = CheckCordonReason(reason_); !reason.ok()) {
      return UsageError(absl::StrCat("--reason: ", reason.message()));
    }
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    quern::v1::Worker worker;
    QUERN_RETURN_IF_ERROR(
        CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return call_(*jobs, context, name, reason_, &worker); }));
    console.out << (json() ? ToJson(worker)
                           : absl::StrCat(worker.name(), "  ", worker.state(),
                                          worker.detail().empty() || worker.detail() == worker.state()
                                              ? ""
                                              : absl::StrCat("  (", OneLine(worker.detail(), worker.detail().size()), ")"),
                                          "\n"));
    return ExitCode::kDone;
  }

 private:
  const std::string name_;
  const std::string summary_;
  const WorkerReason takes_reason_;
  const WorkerCall call_;
  std::string worker_;
  std::string reason_;
};

}  // namespace

std::unique_ptr<Command> NewWorkerChangeCommand(std::string name, std::string summary, WorkerReason reason, WorkerCall call) {
  return std::make_unique<WorkerChangeCommand>(std::move(name), std::move(summary), reason, std::move(call));
}

}  // namespace quern::client
