// Commands that change what a worker gets.
#ifndef QUERN_CLIENT_COMMANDS_WORKER_COMMAND_H_
#define QUERN_CLIENT_COMMANDS_WORKER_COMMAND_H_

#include <functional>
#include <memory>
#include <string>

#include "client/commands/server_command.h"

namespace quern::client {

enum class WorkerReason { kNone, kTaken };  // whether the command has --reason
using WorkerCall = std::function<grpc::Status(quern::v1::Jobs::Stub&, grpc::ClientContext*, const std::string& name,
                                              const std::string& reason, quern::v1::Worker*)>;
// Asks for the change and shows the worker as it is then.
std::unique_ptr<Command> NewWorkerChangeCommand(std::string name, std::string summary, WorkerReason reason, WorkerCall call);

}  // namespace quern::client

#endif  // QUERN_CLIENT_COMMANDS_WORKER_COMMAND_H_
