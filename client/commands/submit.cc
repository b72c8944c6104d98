#include <CLI/CLI.hpp>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/commands/server_command.h"
#include "client/exit_code.h"
#include "client/job_options.h"
#include "client/json_output.h"
#include "client/paths.h"

namespace quern::client {
namespace {

// A request that was sent before the connection broke may have been carried out: the same request_id asks again without doing it twice.
constexpr int kTries = 20;
constexpr std::chrono::milliseconds kPause(500);

class SubmitCommand : public ServerCommand {
 public:
  std::string Name() const override { return "submit"; }
  std::string Summary() const override {
    return "Give a standing coordinator a checkpoint to quantize, or to make plain; memory and threads are those of its workers";
  }
  std::string Example() const override {
    return "quern submit /models/Laguna-S -o /models/Laguna-S-W4 --scheme W4A16_ASYM --group-size 32 --targets routed_experts --detach";
  }

  void AddOptions(CLI::App& app) override {
    options_.AddTo(app, /*output=*/true);
    app.add_option("-o,--output", output_, "Directory of the result")->required()->type_name("OUT");
    app.add_flag("--dequantize", dequantize_, "Make plain weights of a quantized checkpoint, as quern dequantize does");
    app.add_option("--dtype", dtype_, "With --dequantize: bf16, f16 or f32")
        ->check(CLI::IsMember({"bf16", "f16", "f32"}, CLI::ignore_case))
        ->type_name("D")
        ->capture_default_str();
    app.add_option("--reader", reader_, "How workers read files: auto, direct, buffered or mmap")
        ->check(CLI::IsMember({"auto", "direct", "buffered", "mmap"}))
        ->type_name("MODE");
    app.add_option("--priority", priority_, "A job with a higher number goes first; equal ones share the workers (default 0)")
        ->type_name("N");
    app.add_option("--audit", audit_, "Run so many of the tasks again on another worker and compare the bytes: 1%, or 0.01")
        ->type_name("P");
    app.add_flag("--detach", detach_, "Print the job's name, and nothing else, and do not wait for its end");
    ServerCommand::AddOptions(app);
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    quern::v1::CreateJobRequest request;
    request.set_request_id(RandomUuid());
    request.set_priority(priority_);
    if (!audit_.empty()) {
      QUERN_ASSIGN_OR_RETURN(const double audit, ParseFraction("--audit", audit_));
      request.set_audit_fraction(audit);
    }
    quern::v1::JobSpec& spec = *request.mutable_spec();
    if (dequantize_) {
      spec.set_operation(quern::v1::DEQUANTIZE);
      QUERN_ASSIGN_OR_RETURN(*spec.mutable_dequantize(), ToDequantizeSpec());
      spec.mutable_dequantize()->set_reader(reader_);
    } else {
      spec.set_operation(quern::v1::QUANTIZE);
      QUERN_ASSIGN_OR_RETURN(*spec.mutable_quantize(), options_.ToSpec(/*remote=*/true));
      spec.mutable_quantize()->set_reader(reader_);
    }
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_output(), AbsolutePath(output_));
    QUERN_ASSIGN_OR_RETURN(const auto jobs, Connect());

    quern::v1::Job job;
    absl::Status status = absl::CancelledError("interrupted");
    for (int i = 0; i < kTries && !interrupt.requested(); ++i) {
      if (i > 0) std::this_thread::sleep_for(kPause);
      status = CallInterruptibly(interrupt, [&](grpc::ClientContext* context) { return jobs->CreateJob(context, request, &job); });
      if (!absl::IsUnavailable(status)) break;
    }
    QUERN_RETURN_IF_ERROR(status);
    if (!detach_) {
      console.err << job.name() << "\n";
      return WatchAndReport(*jobs, job, interrupt, json(), console);
    }
    console.out << (json() ? ToJson(job) : absl::StrCat(job.name(), "\n"));
    return ExitCode::kDone;
  }

 private:
  absl::StatusOr<quern::v1::DequantizeSpec> ToDequantizeSpec() const {
    if (options_.SaysHow()) return UsageError("--dequantize takes no recipe: leave out --scheme, --recipe and what goes with them");
    DequantizeOptions options;
    options.source = options_.source;
    options.dtype = dtype_;
    options.max_shard_size = options_.max_shard_size;
    options.overwrite = options_.overwrite;
    options.verify_source = options_.verify_source;
    return options.ToSpec(/*remote=*/true);
  }

  QuantizeOptions options_;
  std::string dtype_ = "bf16";
  bool dequantize_ = false;
  std::string output_;
  std::string reader_;
  int32_t priority_ = 0;
  std::string audit_;  // empty: not said
  bool detach_ = false;
};

}  // namespace

std::unique_ptr<Command> NewSubmitCommand() { return std::make_unique<SubmitCommand>(); }

}  // namespace quern::client
