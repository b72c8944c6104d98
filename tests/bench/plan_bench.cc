// How long a plan takes: makes a sparse synthetic checkpoint in a temporary directory and plans its quantization from the headers.
// plan_bench [LAYERS [EXPERTS [QUERN]]], by default 100,000 tensors and more. With the path of the program `quern` the command line is
// timed too: the median of five runs of `quern plan`, as text and with --json. Exit 1 when one of these takes two seconds or longer.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/subprocess.h"
#include "checkpoint/index.h"
#include "daemon/planner/planner.h"

namespace {

constexpr double kLimitSeconds = 2;
constexpr int kCommandRuns = 5;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Headers are written, data is a hole.
absl::Status WriteSparse(const quern::daemon::Plan& plan, const std::string& directory) {
  quern::checkpoint::ShardIndex index;
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    const quern::v1::WriteShard& work = task.write_shard();
    const std::string path = quern::JoinPath(directory, task.label());
    QUERN_ASSIGN_OR_RETURN(quern::UniqueFd file, quern::OpenFile(path, O_CREAT | O_WRONLY));
    QUERN_RETURN_IF_ERROR(quern::WriteExactly(file.get(), 0, work.header().data(), work.header().size(), path));
    if (ftruncate(file.get(), static_cast<off_t>(work.file_size())) != 0) return quern::ErrnoToStatus(errno, "ftruncate", path);
    QUERN_RETURN_IF_ERROR(file.Close(path));
    for (const quern::v1::ShardUnit& unit : work.units()) index.weight_map[unit.generate().output().name()] = task.label();
  }
  QUERN_RETURN_IF_ERROR(
      quern::WriteFileDurably(quern::JoinPath(directory, "model.safetensors.index.json"), quern::checkpoint::BuildShardIndex(index)));
  return quern::WriteFileDurably(quern::JoinPath(directory, "config.json"), plan.summary.synthetic_config());
}

absl::StatusOr<double> TimeCommand(const std::vector<std::string>& argv, const std::string& log) {
  std::vector<double> seconds;
  for (int i = 0; i < kCommandRuns; ++i) {
    QUERN_RETURN_IF_ERROR(quern::RemoveFile(log));
    quern::Subprocess::Options options;
    options.argv = argv;
    options.tie_to_parent = false;
    options.log_path = log;
    const auto start = std::chrono::steady_clock::now();
    QUERN_ASSIGN_OR_RETURN(quern::Subprocess child, quern::Subprocess::Spawn(options));
    QUERN_ASSIGN_OR_RETURN(const quern::ExitState state, child.Wait());
    seconds.push_back(SecondsSince(start));
    if (state.signaled || state.code != 0) return absl::InternalError(absl::StrCat(argv[0], " ended with ", state.ToString()));
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kCommandRuns / 2];
}

absl::Status Run(uint32_t layers, uint32_t experts, const std::string& quern_program) {
  QUERN_ASSIGN_OR_RETURN(const quern::TempDir directory, quern::TempDir::Make("plan_bench"));
  quern::v1::JobSpec spec;
  spec.set_operation(quern::v1::SYNTHESIZE);
  spec.mutable_synthesize()->set_family("laguna");
  spec.mutable_synthesize()->set_layers(layers);
  spec.mutable_synthesize()->set_experts(experts);
  QUERN_ASSIGN_OR_RETURN(const quern::daemon::Plan synthetic, quern::daemon::MakePlan(spec, false));
  QUERN_RETURN_IF_ERROR(WriteSparse(synthetic, directory.path()));

  double worst = 0;
  for (const char* targets : {"routed_experts", "Linear"}) {
    quern::v1::JobSpec job;
    job.set_operation(quern::v1::QUANTIZE);
    job.mutable_quantize()->set_source(directory.path());
    job.mutable_quantize()->set_scheme("W4A16_ASYM");
    job.mutable_quantize()->set_group_size("32");
    job.mutable_quantize()->add_targets(targets);
    job.mutable_quantize()->add_ignore("re:.*self_attn\\.k_norm");
    const auto start = std::chrono::steady_clock::now();
    const std::clock_t cpu_start = std::clock();
    QUERN_ASSIGN_OR_RETURN(const quern::daemon::Plan plan, quern::daemon::MakePlan(job, false));
    const double seconds = SecondsSince(start);
    const double cpu_seconds = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
    worst = std::max(worst, seconds);
    const size_t tensors = quern::daemon::TensorFates(plan).size();
    std::printf("%s: %zu tensors, %zu shards, %.3f s, %.3f s of one core\n", targets, tensors, plan.tasks.size(), seconds, cpu_seconds);
  }
  for (const char* form : {"", "--json", "--all"}) {
    if (quern_program.empty()) break;
    std::vector<std::string> argv = {quern_program,  "plan", directory.path(), "--scheme",      "W4A16_ASYM",
                                     "--group-size", "32",   "--targets",      "routed_experts"};
    if (*form != '\0') argv.emplace_back(form);
    QUERN_ASSIGN_OR_RETURN(const double seconds, TimeCommand(argv, quern::JoinPath(directory.path(), "log")));
    worst = std::max(worst, seconds);
    std::printf("quern plan %s: %.3f s\n", form, seconds);
  }
  if (worst < kLimitSeconds) return absl::OkStatus();
  return absl::DeadlineExceededError("a plan took two seconds or longer");
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Run(argc > 1 ? std::atoi(argv[1]) : 131, argc > 2 ? std::atoi(argv[2]) : 256, argc > 3 ? argv[3] : "");
  if (status.ok()) return 0;
  std::fprintf(stderr, "plan_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
