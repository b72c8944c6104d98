#include "client/commands/worker_command.h"

namespace quern::client {

std::unique_ptr<Command> NewUncordonCommand() {
  return NewWorkerChangeCommand("uncordon", "Give a worker work again that was cordoned, or set aside for its failures",
                                WorkerReason::kNone,
                                [](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context, const std::string& name, const std::string&,
                                   quern::v1::Worker* worker) {
                                  quern::v1::UncordonWorkerRequest request;
                                  request.set_name(name);
                                  return jobs.UncordonWorker(context, request, worker);
                                });
}

}  // namespace quern::client
