#include "base/status_macros.h"
#include "client/commands/server_command.h"
#include "client/job_report.h"
#include "client/json_output.h"

namespace quern::client {
namespace {

class JobsCommand : public ServerCommand {
 public:
  std::string Name() const override { return "jobs"; }
  std::string Summary() const override { return "List the jobs of a coordinator"; }
  std::string Example() const override { return "quern jobs --server unix:/run/quern/quern.sock"; }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    quern::v1::ListJobsResponse all;
    quern::v1::ListJobsRequest request;
    do {
      quern::v1::ListJobsResponse page;
      QUERN_RETURN_IF_ERROR(
          CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return jobs->ListJobs(context, request, &page); }));
      request.set_page_token(page.next_page_token());
      page.clear_next_page_token();
      all.MergeFrom(page);
    } while (!request.page_token().empty());
    console.out << (json() ? ToJson(all) : FormatJobs(all, console.clock->Wall()));
    return ExitCode::kDone;
  }
};

}  // namespace

std::unique_ptr<Command> NewJobsCommand() { return std::make_unique<JobsCommand>(); }

}  // namespace quern::client
