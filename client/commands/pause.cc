#include "client/commands/server_command.h"

namespace quern::client {

std::unique_ptr<Command> NewPauseCommand() {
  return NewJobChangeCommand("pause", "Let running tasks finish and start no new ones",
                             [](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context, const std::string& name, quern::v1::Job* job) {
                               quern::v1::PauseJobRequest request;
                               request.set_name(name);
                               return jobs.PauseJob(context, request, job);
                             });
}

}  // namespace quern::client
