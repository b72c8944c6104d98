// The coordinator: plans jobs, keeps their queue, publishes their results.
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/empty_option.h"
#include "base/file.h"
#include "base/file_roots.h"
#include "base/status_macros.h"
#include "base/subprocess.h"
#include "base/telemetry/json_log.h"
#include "base/telemetry/metrics_server.h"
#include "base/telemetry/process_metrics.h"
#include "base/time_option.h"
#include "daemon/coordinator_metrics.h"
#include "daemon/queue/job_store.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/log_limiter.h"
#include "daemon/rpc/server.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "quant/numerics_version.h"
#include "spdlog/async.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace quern::daemon {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
// More than the connections and files of any farm; every process may have a table of so many.
constexpr rlim_t kOpenFiles = 65536;
// A worker that is gone holds its tasks for a lease, and a new coordinator waits for one before it takes them away.
constexpr absl::Duration kLongestLease = absl::Hours(24);
constexpr absl::Duration kLongestStall = absl::Hours(24);
constexpr absl::Duration kLongestKept = absl::Hours(100 * 365 * 24);

struct Flags {
  std::string state_dir;
  ServerOptions server;
  std::string socket_mode = "0660";
  std::string metrics_address;  // empty: none
  std::string log_format = "text";
  std::vector<std::string> allow_roots;
  bool in_memory = false;
  bool is_private = false;
  std::optional<int> parent_fd;
  absl::Duration lease = absl::Seconds(30);
  absl::Duration keep_jobs_for = absl::Hours(24 * 30);
  int64_t keep_jobs = 10'000;
};

std::string HostName() {
  char name[256] = "";
  if (gethostname(name, sizeof(name) - 1) != 0) return "unknown host";
  return name;
}

// Waits for SIGTERM or SIGINT; SIGHUP reads the tokens again. They are blocked in all threads, so that only this sees them.
void WaitForSignal(const sigset_t& signals, Server& server) {
  int signal = 0;
  sigwait(&signals, &signal);
  while (signal == SIGHUP) {
    server.Reload();
    sigwait(&signals, &signal);
  }
  spdlog::info("signal {}: stopping", signal);
  // A second one does not wait for what is under way.
  std::thread([signals] {
    int again = SIGHUP;
    while (again == SIGHUP) sigwait(&signals, &again);
    _exit(128 + again);
  }).detach();
}

void RaiseFileLimit() {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= kOpenFiles) return;
  files.rlim_cur = std::min(files.rlim_max, kOpenFiles);
  if (setrlimit(RLIMIT_NOFILE, &files) != 0) spdlog::warn("the limit of open files stays as it is");
}

// What gRPC has to say of connections that fail. Strangers can cause it, so not all of it is written.
void LogForGrpc(gpr_log_func_args* args) {
  static auto* const limiter = new LogLimiter([](const std::string& line) { spdlog::warn("{}", line); }, Clock::Real(), 10);
  limiter->Write(absl::StrCat("grpc: ", args->message));
}

absl::Status Serve(const Flags& flags, const sigset_t& signals) {
  StoreMetrics store_metrics;
  std::unique_ptr<JobStore> store;
  if (flags.in_memory) {
    store = NewMemoryJobStore(&store_metrics);
  } else {
    QUERN_ASSIGN_OR_RETURN(store, OpenRocksDbJobStore(flags.state_dir, &store_metrics));
  }
  // Outlives everything that opens files.
  std::optional<FileConfinement> confinement;
  CoordinatorOptions options;
  options.store = store.get();
  options.clock = Clock::Real();
  if (!flags.is_private) {
    QUERN_ASSIGN_OR_RETURN(options.paths, PathPolicy::Below(flags.allow_roots));
    confinement.emplace(options.paths.roots());
  }
  options.owner = absl::StrCat("quernd (process ", getpid(), " on ", HostName(), ", ",
                               flags.in_memory ? "state in memory" : absl::StrCat("state in ", flags.state_dir), ")");
  options.lease = flags.lease;
  options.settle = flags.is_private ? absl::ZeroDuration() : flags.lease;
  options.bad_input_witnesses = flags.is_private ? 1 : 2;
  options.keep_jobs_for = flags.keep_jobs_for;
  options.keep_jobs = static_cast<size_t>(flags.keep_jobs);
  options.log = [](const std::string& line) { spdlog::info("{}", line); };
  options.on_broken = [](absl::Status status) {
    // The log's own thread would not get to it.
    fprintf(stderr, "quernd: the job store failed, nothing can be promised any more: %s\n", status.ToString().c_str());
    // Clients see the connection end, and a new process goes on from what is durable.
    _exit(kExitFailed);
  };
  QUERN_ASSIGN_OR_RETURN(std::unique_ptr<Coordinator> coordinator, Coordinator::Start(std::move(options)));
  QUERN_ASSIGN_OR_RETURN(std::unique_ptr<Server> server, Server::Start(coordinator.get(), flags.server));
  std::unique_ptr<MetricsServer> metrics;
  if (!flags.metrics_address.empty()) {
    // It serves from here on until it stops. What there is to find out is whether the queue's lock is free.
    const auto queue_answers = [&coordinator] {
      coordinator->queue()->Record(0);
      return absl::OkStatus();
    };
    QUERN_ASSIGN_OR_RETURN(metrics, MetricsServer::Start(flags.metrics_address,
                                                         [&coordinator, &server, &store_metrics] {
                                                           std::vector<MetricFamily> families =
                                                               CollectCoordinatorMetrics(*coordinator, *server, store_metrics);
                                                           AddProcessMetrics("quernd", QUERN_VERSION, quant::kNumericsVersion, &families);
                                                           return families;
                                                         },
                                                         {.live = queue_answers, .ready = queue_answers}));
  }
  // Only now: before, there is nothing to stop cleanly.
  WatchParent(flags.parent_fd.value_or(-1), [] {
    if (kill(getpid(), SIGTERM) != 0) _exit(kExitFailed);
  });
  for (const std::string& address : server->addresses()) spdlog::info("listening on {}", address);
  if (metrics != nullptr) spdlog::info("{}", metrics->Describe());
  WaitForSignal(signals, *server);
  metrics.reset();
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
  app.add_option("--listen", flags.server.addresses,
                 "unix:/path or host:port; may be repeated. Addresses that other machines can reach need TLS and tokens")
      ->required();
  app.add_option("--socket-mode", flags.socket_mode, "Mode of unix sockets: 0660, or 0600 for their owner alone")
      ->check(CLI::IsMember({"0600", "0660"}))
      ->capture_default_str();
  app.add_option("--token-file", flags.server.token_file, "Tokens and their roles, one NAME ROLES TOKEN a line; asked for in every call");
  app.add_option("--tls-cert", flags.server.tls.certificate, "This coordinator's certificate (PEM)");
  app.add_option("--tls-key", flags.server.tls.key, "Its private key (PEM)");
  app.add_option("--tls-client-ca", flags.server.tls.authority,
                 "Certificates of the authority that signs those of clients and workers (PEM)");
  std::string stream_timeout = "1m";
  app.add_option("--stream-timeout", stream_timeout, "A client that takes nothing of a stream or a data connection for so long is cut off (30s, 2m)")
      ->capture_default_str();
  app.add_option("--max-connections", flags.server.limits.connections, "Connections that may be open at a time")
      ->check(CLI::Range(1, 50000))
      ->capture_default_str();
  app.add_option("--max-connections-per-address", flags.server.limits.connections_per_peer,
                 "Of one address, or one user of a unix socket (default three quarters of --max-connections)")
      ->check(CLI::Range(1, 50000));
  app.add_option("--max-calls-per-client", flags.server.limits.calls_per_caller,
                 "Calls that one token and certificate may have open at a time")
      ->check(CLI::Range(1, 50000))
      ->capture_default_str();
  app.add_option("--allow-root", flags.allow_roots, "Directory below which clients may name sources and outputs; may be repeated");
  app.add_option("--metrics-listen", flags.metrics_address,
                 "host:port for Prometheus (GET /metrics); without TLS and tokens, so best a loopback address (default: none)")
      ->type_name("ADDR");
  app.add_option("--log-format", flags.log_format, "Lines of the log: text, or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  app.add_flag("--in-memory", flags.in_memory, "Keep the jobs in memory only; needs no --state-dir");
  app.add_flag("--private", flags.is_private, "Serve one command: every path of the user is allowed, only warnings are logged");
  std::string lease, keep_jobs_for;
  app.add_option("--lease", lease, "How long a worker may be silent before its tasks are given to others (default 30s)")->type_name("TIME");
  app.add_option("--keep-jobs-for", keep_jobs_for, "Ended jobs are forgotten after this (default 720h)")->type_name("TIME");
  app.add_option("--keep-jobs", flags.keep_jobs, "Ended jobs that are kept at most; the oldest are forgotten first")
      ->check(CLI::Range(int64_t{0}, int64_t{1'000'000'000}))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--parent-fd", flags.parent_fd, "Stop when the pipe with this number is closed");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (const absl::Status given = CheckNoEmptyOption(app); !given.ok()) {
    fprintf(stderr, "quernd: %s\n", std::string(given.message()).c_str());
    return kExitUsage;
  }
  for (const auto& [flag, text, most, value] :
       {std::tuple("--lease", &lease, kLongestLease, &flags.lease),
        std::tuple("--keep-jobs-for", &keep_jobs_for, kLongestKept, &flags.keep_jobs_for),
        std::tuple("--stream-timeout", &stream_timeout, kLongestStall, &flags.server.limits.streams.stalled)}) {
    if (text->empty()) continue;
    const absl::StatusOr<absl::Duration> time = ParseTimeOption(*text, absl::Seconds(1), most);
    if (!time.ok()) {
      fprintf(stderr, "quernd: %s: %s\n", flag, std::string(time.status().message()).c_str());
      return kExitUsage;
    }
    *value = *time;
  }
  if (flags.in_memory == !flags.state_dir.empty()) {
    fprintf(stderr, "quernd: give either --state-dir DIR or --in-memory\n");
    return kExitUsage;
  }
  if (flags.parent_fd.has_value() && fcntl(*flags.parent_fd, F_GETFD) < 0) {
    fprintf(stderr, "quernd: --parent-fd %d: this process has no such open file\n", *flags.parent_fd);
    return kExitUsage;
  }
  if (const absl::Status status = CheckServerOptions(flags.server); !status.ok()) {
    fprintf(stderr, "quernd: %s\n", std::string(status.message()).c_str());
    return kExitUsage;
  }
  for (const std::string& root : flags.allow_roots) {
    // One that does not exist yet may be a mount that comes: that is no wrong usage, and a service manager tries again.
    struct stat found;
    const bool absolute = absl::StartsWith(root, "/");
    if (absolute && (stat(root.c_str(), &found) != 0 || S_ISDIR(found.st_mode))) continue;
    fprintf(stderr, "quernd: --allow-root %s: %s\n", root.c_str(), absolute ? "it is no directory" : "the path must be absolute");
    return kExitUsage;
  }
  if (!flags.metrics_address.empty()) {
    if (const absl::Status status = ParseMetricsAddress(flags.metrics_address).status(); !status.ok()) {
      fprintf(stderr, "quernd: --metrics-listen %s\n", std::string(status.message()).c_str());
      return kExitUsage;
    }
  }
  flags.server.socket_mode = flags.socket_mode == "0600" ? 0600 : 0660;
  flags.server.log = [](const std::string& line) { spdlog::info("{}", line); };
  // Abseil as distributions build it keeps a graph of all mutexes that a thread holds, and gRPC locks some at each call.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // Plans are large and short-lived: with an arena for each thread they would stay.
  mallopt(M_ARENA_MAX, 2);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  // That of one command goes with its terminal.
  if (!flags.is_private) sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before gRPC has threads, so that they have them blocked too
  // On a thread of its own: a disk that is busy, or a slow reader of the log, must not hold up renewals.
  spdlog::set_default_logger(spdlog::stderr_logger_mt<spdlog::async_factory>("quernd"));
  if (flags.log_format == "json") spdlog::set_formatter(NewJsonLogFormatter("quernd"));
  spdlog::set_level(flags.is_private ? spdlog::level::warn : spdlog::level::info);
  // Never given back: when its last user is gone, gRPC ends its threads, and one that is polling makes that take ten seconds.
  grpc_init();
  gpr_set_log_function(LogForGrpc);
  RaiseFileLimit();
  const absl::Status status = Serve(flags, signals);
  if (!status.ok()) spdlog::critical("{}", std::string(status.message()));
  spdlog::shutdown();
  return status.ok() ? 0 : kExitFailed;
}

}  // namespace
}  // namespace quern::daemon

int main(int argc, char** argv) { return quern::daemon::Main(argc, argv); }
