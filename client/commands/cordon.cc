#include "client/commands/worker_command.h"

namespace quern::client {

std::unique_ptr<Command> NewCordonCommand() {
  return NewWorkerChangeCommand("cordon", "Give a worker nothing new, until it is uncordoned", WorkerReason::kTaken,
                                [](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context, const std::string& name,
                                   const std::string& reason, quern::v1::Worker* worker) {
                                  quern::v1::CordonWorkerRequest request;
                                  request.set_name(name);
                                  request.set_reason(reason);
                                  return jobs.CordonWorker(context, request, worker);
                                });
}

}  // namespace quern::client
