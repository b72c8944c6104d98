#include "client/commands/server_command.h"

namespace quern::client {

std::unique_ptr<Command> NewResumeCommand() {
  return NewJobChangeCommand("resume", "Go on with a paused job",
                             [](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context, const std::string& name, quern::v1::Job* job) {
                               quern::v1::ResumeJobRequest request;
                               request.set_name(name);
                               return jobs.ResumeJob(context, request, job);
                             });
}

}  // namespace quern::client
