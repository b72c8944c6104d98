#include "client/commands/worker_command.h"

namespace quern::client {

std::unique_ptr<Command> NewDrainCommand() {
  return NewWorkerChangeCommand("drain", "Let a worker finish what it runs, and end", WorkerReason::kNone,
                                [](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context, const std::string& name, const std::string&,
                                   quern::v1::Worker* worker) {
                                  quern::v1::DrainWorkerRequest request;
                                  request.set_name(name);
                                  return jobs.DrainWorker(context, request, worker);
                                });
}

}  // namespace quern::client
