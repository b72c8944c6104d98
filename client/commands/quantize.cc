#include <CLI/CLI.hpp>

#include "base/status_macros.h"
#include "client/commands/command.h"
#include "client/job_options.h"
#include "client/paths.h"
#include "client/private_job.h"

namespace quern::client {
namespace {

constexpr size_t kWorstModules = 5;

class QuantizeCommand : public Command {
 public:
  std::string Name() const override { return "quantize"; }
  std::string Summary() const override { return "Quantize a checkpoint on this machine; run again to continue"; }
  std::string Example() const override {
    return "quern quantize /models/Laguna-S -o /models/Laguna-S-W4 --scheme W4A16_ASYM --group-size 32 --targets routed_experts";
  }

  void AddOptions(CLI::App& app) override {
    job_.AddTo(app, /*output=*/true);
    app.add_option("-o,--output", output_, "Directory of the result: absent, empty, or begun by an earlier run")
        ->required()
        ->type_name("OUT");
    worker_.AddTo(app);
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    quern::v1::JobSpec spec;
    spec.set_operation(quern::v1::QUANTIZE);
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_quantize(), job_.ToSpec(/*remote=*/false));
    QUERN_ASSIGN_OR_RETURN(const uint64_t memory, worker_.MemoryBytes());
    spec.mutable_quantize()->set_memory(memory);
    spec.mutable_quantize()->set_reader(worker_.reader);
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_output(), AbsolutePath(output_));
    QUERN_RETURN_IF_ERROR(CheckApart(spec.quantize().source(), spec.output()));

    return RunToOutput(spec, worker_, kWorstModules, json(), console);
  }

 private:
  QuantizeOptions job_;
  WorkerOptions worker_;
  std::string output_;
};

}  // namespace

std::unique_ptr<Command> NewQuantizeCommand() { return std::make_unique<QuantizeCommand>(); }

}  // namespace quern::client
