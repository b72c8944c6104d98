#include "client/commands/server_command.h"

namespace quern::client {

std::unique_ptr<Command> NewCancelCommand() {
  return NewJobChangeCommand("cancel", "End a job for good",
                             [](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context, const std::string& name, quern::v1::Job* job) {
                               quern::v1::CancelJobRequest request;
                               request.set_name(name);
                               return jobs.CancelJob(context, request, job);
                             });
}

}  // namespace quern::client
