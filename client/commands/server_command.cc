#include "client/commands/server_command.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/job_report.h"
#include "client/json_output.h"
#include "client/progress.h"
#include "client/watch_job.h"

namespace quern::client {
namespace {

constexpr absl::Duration kConnectTimeout = absl::Seconds(5);
constexpr int kPageSize = 500;

class JobChangeCommand : public JobCommand {
 public:
  JobChangeCommand(std::string name, std::string summary, JobCall call)
      : name_(std::move(name)), summary_(std::move(summary)), call_(std::move(call)) {}

  std::string Name() const override { return name_; }
  std::string Summary() const override { return summary_; }
  std::string Example() const override { return absl::StrCat("quern ", name_, " jobs/7"); }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, JobName(job()));
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());
    quern::v1::Job changed;
    QUERN_RETURN_IF_ERROR(
        CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return call_(*jobs, context, name, &changed); }));
    console.out << (json() ? ToJson(changed) : absl::StrCat(changed.name(), "  ", StateName(changed.state()), "\n"));
    return ExitCode::kDone;
  }

 private:
  const std::string name_;
  const std::string summary_;
  const JobCall call_;
};

}  // namespace

void ServerCommand::AddOptions(CLI::App& app) {
  app.add_option("--server", server_, "Address of the coordinator: unix:/path or host:port")
      ->envname("QUERN_SERVER")
      ->type_name("ADDR")
      ->capture_default_str();
  app.add_option("--tls-ca", security_.tls.authority, "Certificates of the authority that signed the coordinator's (PEM)")
      ->envname("QUERN_TLS_CA")
      ->type_name("FILE");
  app.add_option("--tls-cert", security_.tls.certificate, "This client's certificate (PEM)")->envname("QUERN_TLS_CERT")->type_name("FILE");
  app.add_option("--tls-key", security_.tls.key, "Its private key (PEM)")->envname("QUERN_TLS_KEY")->type_name("FILE");
  app.add_option("--token-file", security_.token_file, "File that holds the token for the coordinator, and nothing else")
      ->envname("QUERN_TOKEN_FILE")
      ->type_name("FILE");
}

absl::StatusOr<std::unique_ptr<quern::v1::Jobs::Stub>> ServerCommand::Connect() const {
  return ConnectToServer(server_, security_, kConnectTimeout);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> ServerCommand::ConnectChannel() const {
  return client::ConnectChannel(server_, security_, kConnectTimeout);
}

void JobCommand::AddOptions(CLI::App& app) {
  app.add_option("job", job_, "The job: jobs/7, or 7")->required()->type_name("JOB");
  ServerCommand::AddOptions(app);
}

absl::StatusOr<quern::v1::Job> GetJob(quern::v1::Jobs::Stub& jobs, const std::string& name, Interrupt& interrupt) {
  quern::v1::GetJobRequest request;
  request.set_name(name);
  quern::v1::Job job;
  QUERN_RETURN_IF_ERROR(CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return jobs.GetJob(context, request, &job); }));
  return job;
}

absl::StatusOr<quern::v1::ListTasksResponse> ListAllTasks(quern::v1::Jobs::Stub& jobs, const std::string& job, Interrupt& interrupt) {
  quern::v1::ListTasksResponse all;
  quern::v1::ListTasksRequest request;
  request.set_parent(job);
  request.set_page_size(kPageSize);
  do {
    quern::v1::ListTasksResponse page;
    QUERN_RETURN_IF_ERROR(
        CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return jobs.ListTasks(context, request, &page); }));
    request.set_page_token(page.next_page_token());
    page.clear_next_page_token();
    all.MergeFrom(page);
  } while (!request.page_token().empty());
  return all;
}

absl::StatusOr<ExitCode> WatchAndReport(quern::v1::Jobs::Stub& jobs, const quern::v1::Job& job, Interrupt& interrupt, bool json,
                                        Console& console) {
  Progress progress(&console.err, console.clock, {.terminal = console.err_is_terminal, .width = console.err_width});
  QUERN_ASSIGN_OR_RETURN(const WatchOutcome outcome, WatchJob(jobs, job, /*farm=*/nullptr, interrupt, progress, console.clock));
  if (outcome.interrupted) {
    console.err << job.name() << " goes on; quern watch " << job.name() << " shows it again, quern cancel " << job.name() << " ends it\n";
  }
  ReportOutcome(outcome, json, console);
  return outcome.interrupted ? ExitCode::kFailed : ExitCodeOf(outcome.job);
}

std::unique_ptr<Command> NewJobChangeCommand(std::string name, std::string summary, JobCall call) {
  return std::make_unique<JobChangeCommand>(std::move(name), std::move(summary), std::move(call));
}

}  // namespace quern::client
