#include <CLI/CLI.hpp>

#include "base/status_macros.h"
#include "client/commands/command.h"
#include "client/job_options.h"
#include "client/job_report.h"
#include "client/paths.h"
#include "client/private_job.h"

namespace quern::client {
namespace {

class VerifyCommand : public Command {
 public:
  std::string Name() const override { return "verify"; }
  std::string Summary() const override { return "Check a result against its manifest, and against its source"; }
  std::string Example() const override { return "quern verify /models/Laguna-S-W4 --against /models/Laguna-S"; }

  void AddOptions(CLI::App& app) override {
    app.add_option("output", output_, "Directory written by quern quantize")->required()->type_name("OUT");
    app.add_option("--against", against_, "Source: decode every module and compute its error again")->type_name("SRC");
    worker_.AddTo(app);
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    quern::v1::JobSpec spec;
    spec.set_operation(quern::v1::VERIFY);
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_output(), ExistingDirectory(output_));
    spec.mutable_verify();
    if (!against_.empty()) {
      QUERN_ASSIGN_OR_RETURN(*spec.mutable_verify()->mutable_against(), ResolveSource(against_, /*remote=*/false));
    }
    QUERN_ASSIGN_OR_RETURN(const WatchOutcome outcome, RunPrivateJob(spec, worker_, /*durable=*/false, console));
    ReportOutcome(outcome, json(), console);
    return outcome.interrupted ? ExitCode::kFailed : ExitCodeOf(outcome.job);
  }

 private:
  std::string output_;
  std::string against_;
  WorkerOptions worker_;
};

}  // namespace

std::unique_ptr<Command> NewVerifyCommand() { return std::make_unique<VerifyCommand>(); }

}  // namespace quern::client
