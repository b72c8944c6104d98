#include <CLI/CLI.hpp>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/commands/command.h"
#include "client/exit_code.h"
#include "client/job_options.h"
#include "client/job_report.h"
#include "client/paths.h"
#include "client/private_job.h"

namespace quern::client {
namespace {

class SynthCommand : public Command {
 public:
  std::string Name() const override { return "synth"; }
  std::string Summary() const override { return "Write a checkpoint with seeded, realistic weights, of any size"; }
  std::string Example() const override { return "quern synth /tmp/laguna-3 --family laguna --layers 3 --seed 1"; }

  void AddOptions(CLI::App& app) override {
    app.add_option("output", output_, "Directory to write")->required()->type_name("OUT");
    app.add_option("--family", family_, "laguna, qwen3_moe, mixtral or llama")->required()->type_name("NAME");
    app.add_option("--layers", layers_, "Layers")->required()->check(CLI::PositiveNumber)->type_name("N");
    app.add_option("--experts", experts_, "Experts of a layer (default: the family's, as below)")
        ->check(CLI::PositiveNumber)
        ->type_name("E");
    app.add_option("--hidden", hidden_, "Hidden size")->check(CLI::PositiveNumber)->type_name("H");
    app.add_option("--intermediate", intermediate_, "Intermediate size of an expert, or of the MLP")
        ->check(CLI::PositiveNumber)
        ->type_name("I");
    app.add_option("--vocab", vocab_, "Vocabulary")->check(CLI::PositiveNumber)->type_name("V");
    app.add_option("--seed", seed_, "Seed of the weights: the same seed gives the same bytes")->type_name("S")->capture_default_str();
    app.add_option("--dtype", dtype_, "BF16, F16 or F32")
        ->check(CLI::IsMember({"BF16", "F16", "F32"}))
        ->type_name("D")
        ->capture_default_str();
    app.add_option("--max-shard-size", max_shard_size_, "Largest file of the output")->type_name("SIZE")->capture_default_str();
    app.add_flag("--overwrite", overwrite_, "Replace a result of Quern that is in the output");
    worker_.AddTo(app);
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    quern::v1::JobSpec spec;
    spec.set_operation(quern::v1::SYNTHESIZE);
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_output(), AbsolutePath(output_));
    quern::v1::SynthesizeSpec& synthesize = *spec.mutable_synthesize();
    synthesize.set_family(family_);
    synthesize.set_layers(layers_);
    synthesize.set_experts(experts_);
    synthesize.set_hidden(hidden_);
    synthesize.set_intermediate(intermediate_);
    synthesize.set_vocab(vocab_);
    // CLI11 takes -1, and what is too large, as some other number.
    uint64_t seed = 0;
    if (seed_.find_first_not_of("0123456789") != std::string::npos || !absl::SimpleAtoi(seed_, &seed)) {
      return UsageError(absl::StrCat("--seed: \"", seed_, "\" is no number from 0 to 18446744073709551615"));
    }
    synthesize.set_seed(seed);
    synthesize.set_dtype(dtype_);
    synthesize.set_overwrite(overwrite_);
    QUERN_ASSIGN_OR_RETURN(const uint64_t shard_size, ParseSizeOption("--max-shard-size", max_shard_size_));
    synthesize.set_max_shard_size(shard_size);
    QUERN_ASSIGN_OR_RETURN(const WatchOutcome outcome, RunPrivateJob(spec, worker_, /*durable=*/true, console));
    ReportOutcome(outcome, json(), console);
    return outcome.interrupted ? ExitCode::kFailed : ExitCodeOf(outcome.job);
  }

 private:
  std::string output_;
  std::string family_;
  uint32_t layers_ = 0;
  uint32_t experts_ = 0;
  uint32_t hidden_ = 0;
  uint32_t intermediate_ = 0;
  uint32_t vocab_ = 0;
  std::string seed_ = "0";
  std::string dtype_ = "BF16";
  std::string max_shard_size_ = "2GiB";
  bool overwrite_ = false;
  WorkerOptions worker_;
};

}  // namespace

std::unique_ptr<Command> NewSynthCommand() { return std::make_unique<SynthCommand>(); }

}  // namespace quern::client
