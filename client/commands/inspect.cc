#include <CLI/CLI.hpp>

#include "base/status_macros.h"
#include "base/text_check.h"
#include "client/commands/command.h"
#include "client/json_output.h"
#include "client/paths.h"
#include "client/plan_report.h"
#include "client/private_job.h"

namespace quern::client {
namespace {

class InspectCommand : public Command {
 public:
  std::string Name() const override { return "inspect"; }
  std::string Summary() const override { return "Show the layers, roles, dtypes and sizes of a checkpoint"; }
  std::string Example() const override { return "quern inspect /models/Laguna-S"; }

  void AddOptions(CLI::App& app) override {
    app.add_option("source", source_, "Checkpoint directory, or org/name[@revision] in the local Hugging Face cache")
        ->required()
        ->type_name("DIR");
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    quern::v1::InspectCheckpointRequest request;
    QUERN_ASSIGN_OR_RETURN(*request.mutable_path(), ResolveSource(source_, /*remote=*/false));
    quern::v1::InspectCheckpointResponse response;
    QUERN_RETURN_IF_ERROR(AskPrivateCoordinator(console, [&](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context) {
      return jobs.InspectCheckpoint(context, request, &response);
    }));
    console.out << (json() ? ToJson(response) : PlainLines(FormatInspection(response)));
    return ExitCode::kDone;
  }

 private:
  std::string source_;
};

}  // namespace

std::unique_ptr<Command> NewInspectCommand() { return std::make_unique<InspectCommand>(); }

}  // namespace quern::client
