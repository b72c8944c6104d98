// What the commands have in common that talk to a standing coordinator.
#ifndef QUERN_CLIENT_COMMANDS_SERVER_COMMAND_H_
#define QUERN_CLIENT_COMMANDS_SERVER_COMMAND_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/commands/command.h"
#include "client/connection.h"
#include "client/interrupt.h"
#include "quern/v1/jobs.grpc.pb.h"

namespace quern::client {

class ServerCommand : public Command {
 public:
  void AddOptions(CLI::App& app) override;

 protected:
  // Connects, or says why not.
  absl::StatusOr<std::unique_ptr<quern::v1::Jobs::Stub>> Connect() const;
  absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel() const;
  const std::string& server() const { return server_; }
  const ChannelSecurity& security() const { return security_; }

 private:
  std::string server_ = kDefaultServer;
  ChannelSecurity security_;
};

// A command about one job, named by an argument.
class JobCommand : public ServerCommand {
 public:
  void AddOptions(CLI::App& app) override;

 protected:
  // As it was typed.
  const std::string& job() const { return job_; }

 private:
  std::string job_;
};

absl::StatusOr<quern::v1::Job> GetJob(quern::v1::Jobs::Stub& jobs, const std::string& name, Interrupt& interrupt);

// All pages of the tasks of a job.
absl::StatusOr<quern::v1::ListTasksResponse> ListAllTasks(quern::v1::Jobs::Stub& jobs, const std::string& job, Interrupt& interrupt);

// Watches a job of a standing coordinator and prints how it ended. An interrupt ends only the watching.
absl::StatusOr<ExitCode> WatchAndReport(quern::v1::Jobs::Stub& jobs, const quern::v1::Job& job, Interrupt& interrupt, bool json,
                                        Console& console);

// A command that asks for one change of a job and shows the job as it is then.
using JobCall = std::function<grpc::Status(quern::v1::Jobs::Stub&, grpc::ClientContext*, const std::string& name, quern::v1::Job*)>;
std::unique_ptr<Command> NewJobChangeCommand(std::string name, std::string summary, JobCall call);

}  // namespace quern::client

#endif  // QUERN_CLIENT_COMMANDS_SERVER_COMMAND_H_
