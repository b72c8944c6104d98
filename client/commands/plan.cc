#include <CLI/CLI.hpp>

#include "base/status_macros.h"
#include "base/text_check.h"
#include "client/commands/command.h"
#include "client/job_options.h"
#include "client/json_output.h"
#include "client/plan_report.h"
#include "client/private_job.h"

namespace quern::client {
namespace {

class PlanCommand : public Command {
 public:
  std::string Name() const override { return "plan"; }
  std::string Summary() const override { return "Show what quantize would do, without reading a weight"; }
  std::string Example() const override { return "quern plan /models/Laguna-S --scheme W4A16 --targets Linear"; }

  void AddOptions(CLI::App& app) override {
    job_.AddTo(app, /*output=*/false);
    app.add_option("--memory", memory_, "Memory for buffers that the plan is made for")->type_name("SIZE")->capture_default_str();
    app.add_flag("--all", all_, "A line for every tensor, not for every kind of them");
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    quern::v1::PlanJobRequest request;
    request.mutable_spec()->set_operation(quern::v1::QUANTIZE);
    QUERN_ASSIGN_OR_RETURN(*request.mutable_spec()->mutable_quantize(), job_.ToSpec(/*remote=*/false));
    QUERN_ASSIGN_OR_RETURN(const uint64_t memory, ParseSizeOption("--memory", memory_));
    request.mutable_spec()->mutable_quantize()->set_memory(memory);

    quern::v1::PlanJobResponse plan;
    QUERN_RETURN_IF_ERROR(AskPrivateCoordinator(console, [&](quern::v1::Jobs::Stub& jobs, grpc::ClientContext* context) {
      const auto reader = jobs.PlanJob(context, request);
      quern::v1::PlanJobResponse part;
      while (reader->Read(&part)) {
        if (part.has_summary()) *plan.mutable_summary() = std::move(*part.mutable_summary());
        for (quern::v1::TensorFate& fate : *part.mutable_fates()) *plan.add_fates() = std::move(fate);
      }
      return reader->Finish();
    }));
    console.out << (json() ? ToJson(plan) : PlainLines(FormatPlan(plan, all_)));
    return ExitCode::kDone;
  }

 private:
  QuantizeOptions job_;
  std::string memory_ = "512MiB";
  bool all_ = false;
};

}  // namespace

std::unique_ptr<Command> NewPlanCommand() { return std::make_unique<PlanCommand>(); }

}  // namespace quern::client
