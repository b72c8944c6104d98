// The coordinator: plans jobs, keeps their queue, publishes their results.
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/subprocess.h"
#include "daemon/queue/job_store.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/server.h"
#include "grpc/grpc.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace quern::daemon {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

struct Flags {
  std::string state_dir;
  std::vector<std::string> listen;
  std::vector<std::string> allow_roots;
  bool in_memory = false;
  bool is_private = false;
  std::optional<int> parent_fd;
  absl::Duration lease = absl::Seconds(30);
  absl::Duration keep_jobs_for = absl::Hours(24 * 30);
  size_t keep_jobs = 10'000;
};

std::string HostName() {
  char name[256] = "";
  if (gethostname(name, sizeof(name) - 1) != 0) return "unknown host";
  return name;
}

// Waits for SIGTERM or SIGINT. They are blocked in all threads, so that only this sees them.
void WaitForSignal(const sigset_t& signals) {
  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("signal {}: stopping", signal);
  // A second one does not wait for what is under way.
  std::thread([signals] {
    int again = 0;
    sigwait(&signals, &again);
    _exit(128 + again);
  }).detach();
}

absl::Status Serve(const Flags& flags, const sigset_t& signals) {
  std::unique_ptr<JobStore> store;
  if (flags.in_memory) {
    store = NewMemoryJobStore();
  } else {
    QUERN_ASSIGN_OR_RETURN(store, OpenRocksDbJobStore(flags.state_dir));
  }
  CoordinatorOptions options;
  options.store = store.get();
  options.clock = Clock::Real();
  if (!flags.is_private) {
    QUERN_ASSIGN_OR_RETURN(options.paths, PathPolicy::Below(flags.allow_roots));
  }
  options.owner = absl::StrCat("quernd (process ", getpid(), " on ", HostName(), ", ",
                               flags.in_memory ? "state in memory" : absl::StrCat("state in ", flags.state_dir), ")");
  options.lease = flags.lease;
  options.settle = flags.is_private ? absl::ZeroDuration() : flags.lease;
  options.keep_jobs_for = flags.keep_jobs_for;
  options.keep_jobs = flags.keep_jobs;
  options.log = [](const std::string& line) { spdlog::info("{}", line); };
  options.on_broken = [](absl::Status status) {
    spdlog::critical("the job store failed, nothing can be promised any more: {}", status.ToString());
    // Clients see the connection end, and a new process goes on from what is durable.
    _exit(kExitFailed);
  };
  QUERN_ASSIGN_OR_RETURN(std::unique_ptr<Coordinator> coordinator, Coordinator::Start(std::move(options)));
  QUERN_ASSIGN_OR_RETURN(std::unique_ptr<Server> server, Server::Start(coordinator.get(), flags.listen));
  // Only now: before, there is nothing to stop cleanly.
  WatchParent(flags.parent_fd.value_or(-1), [] {
    if (kill(getpid(), SIGTERM) != 0) _exit(kExitFailed);
  });
  for (const std::string& address : server->addresses()) spdlog::info("listening on {}", address);
  WaitForSignal(signals);
  server->Shutdown();
  server.reset();
  coordinator.reset();
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app("The coordinator of Quern: plans jobs, hands their tasks to workers, publishes the results.");
  app.footer(
      "Example:\n  quernd --state-dir /var/lib/quern --listen unix:/run/quern/quern.sock --listen 127.0.0.1:7450 --allow-root "
      "/data/models\n");
  app.set_version_flag("--version", absl::StrCat("quernd ", QUERN_VERSION));
  Flags flags;
  app.add_option("--state-dir", flags.state_dir, "Directory of the job store; made if absent");
  app.add_option("--listen", flags.listen, "unix:/path or a loopback host:port; may be repeated")->required();
  app.add_option("--allow-root", flags.allow_roots, "Directory below which clients may name sources and outputs; may be repeated");
  app.add_flag("--in-memory", flags.in_memory, "Keep the jobs in memory only; needs no --state-dir");
  app.add_flag("--private", flags.is_private, "Serve one command: every path of the user is allowed, only warnings are logged");
  std::string lease, keep_jobs_for;
  app.add_option("--lease", lease, "How long a worker may be silent before its tasks are given to others (default 30s)")->type_name("TIME");
  app.add_option("--keep-jobs-for", keep_jobs_for, "Ended jobs are forgotten after this (default 720h)")->type_name("TIME");
  app.add_option("--keep-jobs", flags.keep_jobs, "Ended jobs that are kept at most; the oldest are forgotten first")
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--parent-fd", flags.parent_fd, "Stop when the pipe with this number is closed");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  for (const auto& [flag, text, value] :
       {std::tuple("--lease", &lease, &flags.lease), std::tuple("--keep-jobs-for", &keep_jobs_for, &flags.keep_jobs_for)}) {
    if (text->empty()) continue;
    if (!absl::ParseDuration(*text, value) || *value < absl::Seconds(1)) {
      fprintf(stderr, "quernd: %s %s: give a time of a second at least, such as 30s or 720h\n", flag, text->c_str());
      return kExitUsage;
    }
  }
  if (flags.in_memory == !flags.state_dir.empty()) {
    fprintf(stderr, "quernd: give either --state-dir DIR or --in-memory\n");
    return kExitUsage;
  }
  if (flags.parent_fd.has_value() && fcntl(*flags.parent_fd, F_GETFD) < 0) {
    fprintf(stderr, "quernd: --parent-fd %d: this process has no such open file\n", *flags.parent_fd);
    return kExitUsage;
  }
  for (const std::string& address : flags.listen) {
    if (const absl::Status status = CheckListenAddress(address); !status.ok()) {
      fprintf(stderr, "quernd: %s\n", std::string(status.message()).c_str());
      return kExitUsage;
    }
  }
  spdlog::set_default_logger(spdlog::stderr_logger_mt("quernd"));
  spdlog::set_level(flags.is_private ? spdlog::level::warn : spdlog::level::info);
  // Plans are large and short-lived: with an arena for each thread they would stay.
  mallopt(M_ARENA_MAX, 2);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before gRPC has threads, so that they have them blocked too
  // Never given back: when its last user is gone, gRPC ends its threads, and one that is polling makes that take ten seconds.
  grpc_init();
  if (const absl::Status status = Serve(flags, signals); !status.ok()) {
    spdlog::critical("{}", std::string(status.message()));
    return kExitFailed;
  }
  return 0;
}

}  // namespace
}  // namespace quern::daemon

int main(int argc, char** argv) { return quern::daemon::Main(argc, argv); }
