#include "base/status_macros.h"
#include "client/commands/server_command.h"
#include "client/job_report.h"
#include "client/json_output.h"

namespace quern::client {
namespace {

class WorkersCommand : public ServerCommand {
 public:
  std::string Name() const override { return "workers"; }
  std::string Summary() const override { return "List the workers of a coordinator"; }
  std::string Example() const override { return "quern workers --json"; }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    quern::v1::ListWorkersResponse all;
    quern::v1::ListWorkersRequest request;
    do {
      quern::v1::ListWorkersResponse page;
      QUERN_RETURN_IF_ERROR(
          CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return jobs->ListWorkers(context, request, &page); }));
      request.set_page_token(page.next_page_token());
      page.clear_next_page_token();
      all.MergeFrom(page);
    } while (!request.page_token().empty());
    console.out << (json() ? ToJson(all) : FormatWorkers(all, console.clock->Wall()));
    return ExitCode::kDone;
  }
};

}  // namespace

std::unique_ptr<Command> NewWorkersCommand() { return std::make_unique<WorkersCommand>(); }

}  // namespace quern::client
