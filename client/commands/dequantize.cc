#include <CLI/CLI.hpp>

#include "base/status_macros.h"
#include "client/commands/command.h"
#include "client/job_options.h"
#include "client/paths.h"
#include "client/private_job.h"

namespace quern::client {
namespace {

class DequantizeCommand : public Command {
 public:
  std::string Name() const override { return "dequantize"; }
  std::string Summary() const override { return "Make plain weights of a quantized checkpoint; run again to continue"; }
  std::string Example() const override { return "quern dequantize /models/Laguna-S-W4 -o /models/Laguna-S-plain --dtype bf16"; }

  void AddOptions(CLI::App& app) override {
    job_.AddTo(app);
    app.add_option("-o,--output", output_, "Directory of the result: absent, empty, or begun by an earlier run")
        ->required()
        ->type_name("OUT");
    worker_.AddTo(app);
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    quern::v1::JobSpec spec;
    spec.set_operation(quern::v1::DEQUANTIZE);
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_dequantize(), job_.ToSpec(/*remote=*/false));
    QUERN_ASSIGN_OR_RETURN(const uint64_t memory, worker_.MemoryBytes());
    spec.mutable_dequantize()->set_memory(memory);
    spec.mutable_dequantize()->set_reader(worker_.reader);
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_output(), AbsolutePath(output_));

    return RunToOutput(spec, worker_, /*worst_modules=*/0, json(), console);
  }

 private:
  DequantizeOptions job_;
  WorkerOptions worker_;
  std::string output_;
};

}  // namespace

std::unique_ptr<Command> NewDequantizeCommand() { return std::make_unique<DequantizeCommand>(); }

}  // namespace quern::client
