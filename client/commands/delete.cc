#include "base/status_macros.h"
#include "client/commands/server_command.h"
#include "client/json_output.h"

namespace quern::client {
namespace {

class DeleteCommand : public JobCommand {
 public:
  std::string Name() const override { return "delete"; }
  std::string Summary() const override { return "Forget an ended job; a finished result stays"; }
  std::string Example() const override { return "quern delete jobs/7"; }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, JobName(job()));
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    quern::v1::DeleteJobRequest request;
    request.set_name(name);
    quern::v1::DeleteJobResponse response;
    QUERN_RETURN_IF_ERROR(
        CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return jobs->DeleteJob(context, request, &response); }));
    console.out << (json() ? ToJson(response) : name + "  deleted\n");
    return ExitCode::kDone;
  }
};

}  // namespace

std::unique_ptr<Command> NewDeleteCommand() { return std::make_unique<DeleteCommand>(); }

}  // namespace quern::client
