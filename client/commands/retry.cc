#include "client/commands/server_command.h"

namespace quern::client {

std::unique_ptr<Command> NewRetryCommand() {
  return NewJobChangeCommand("retry", "Run a failed or cancelled job again from where it stopped",
                             [](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context, const std::string& name, quern::v1::Job* job) {
                               quern::v1::RetryJobRequest request;
                               request.set_name(name);
                               return jobs.RetryJob(context, request, job);
                             });
}

}  // namespace quern::client
