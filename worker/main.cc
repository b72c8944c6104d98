// quern-worker: joins a coordinator and quantizes for it. The same program is supervisor and, with --executor, its child.
#include <fcntl.h>
#include <grpc/grpc.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/byte_size.h"
#include "base/channel/credentials.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/empty_option.h"
#include "base/endpoint.h"
#include "base/file.h"
#include "base/path_map.h"
#include "base/status_macros.h"
#include "base/subprocess.h"
#include "base/task_memory.h"
#include "base/telemetry/json_log.h"
#include "base/telemetry/metrics_server.h"
#include "base/telemetry/process_metrics.h"
#include "base/time_option.h"
#include "base/worker_name.h"
#include "quant/numerics_version.h"
#include "quant/scheme.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"
#include "worker/executor/executor.h"
#include "worker/executor/pipeline_hooks.h"
#include "worker/pipeline/run_task.h"
#include "worker/supervisor/grpc_transport.h"
#include "worker/supervisor/supervisor.h"
#include "worker/supervisor/worker_metrics.h"
#include "worker/transfer/link_data_plane.h"

namespace quern::worker {
namespace {

constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;
// The coordinator said so: another worker has this one's name. To start it again as it is would only stop the other one.
constexpr int kToldToStop = 3;

// A year; a machine that is there for longer needs no limit.
constexpr absl::Duration kLongestAvailable = absl::Hours(365 * 24);

// More than any machine has cores; each thread takes a stack and a share of the buffers.
constexpr int kMaxThreads = 1024;

// sockaddr_un ends a path at 108 bytes with its zero.
constexpr size_t kMaxSocketPath = 107;

struct Flags {
  std::string server;
  ChannelSecurity security;
  std::string memory = "512MiB";
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::string device = "cpu";
  std::string reader = "auto";
  std::optional<std::string> name;
  std::string machine;
  std::string available_for;
  std::vector<std::string> maps;
  std::string spool;
  std::string metrics_address;  // empty: none
  std::string log_format = "text";
  std::optional<int> parent_fd;
  bool executor = false;
  int channel_fd = -1;
};

// What the flags mean, checked.
struct Settings {
  uint64_t memory = 0;
  absl::Duration available_for = absl::InfiniteDuration();
  PathMap paths;
  std::string spool;
};

uint64_t MachineMemory() { return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

std::string DefaultSpool() {
  const char* const directory = getenv("TMPDIR");
  return directory != nullptr && directory[0] != '\0' ? directory : "/tmp";
}

absl::StatusOr<PathMap> ParseMaps(const std::vector<std::string>& maps) {
  PathMap paths;
  for (const std::string& map : maps) {
    if (const absl::Status added = paths.Add(map); !added.ok()) return Annotate(added, "--map");
  }
  return paths;
}

absl::StatusOr<Settings> CheckFlags(const Flags& flags) {
  Settings settings;
  if (flags.server.empty()) return absl::InvalidArgumentError("--server is needed: unix:/path/to/quern.sock or host:port");
  absl::string_view path = flags.server;
  if (absl::ConsumePrefix(&path, "unix:") && path.size() > kMaxSocketPath) {
    return absl::InvalidArgumentError(absl::StrCat("--server: the socket's path has ", path.size(), " bytes, more than ", kMaxSocketPath));
  }
  if (const absl::Status address = ParseServerAddress(flags.server).status(); !address.ok()) return Annotate(address, "--server");
  QUERN_RETURN_IF_ERROR(CheckChannelSecurity(flags.server, flags.security));
  if (flags.device != "cpu") {
    return absl::InvalidArgumentError(absl::StrCat("--device ", flags.device, ": this build has no CUDA backend, the only device is cpu"));
  }
  if (const absl::Status reader = ParseReaderMode(flags.reader).status(); !reader.ok()) return Annotate(reader, "--reader");
  if (flags.threads < 1 || flags.threads > kMaxThreads) {
    return absl::InvalidArgumentError(absl::StrCat("--threads ", flags.threads, ": give 1 to ", kMaxThreads));
  }
  if (flags.name.has_value()) {
    if (const absl::Status name = CheckWorkerName(*flags.name); !name.ok()) return Annotate(name, "--name");
  }
  if (!flags.metrics_address.empty()) {
    if (const absl::Status address = ParseMetricsAddress(flags.metrics_address).status(); !address.ok()) {
      return Annotate(address, "--metrics-listen");
    }
  }
  if (flags.parent_fd.has_value() && fcntl(*flags.parent_fd, F_GETFD) < 0) {
    return absl::InvalidArgumentError(absl::StrCat("--parent-fd ", *flags.parent_fd, ": this process has no such open file"));
  }
  const absl::StatusOr<uint64_t> memory = ParseByteSize(flags.memory);
  if (!memory.ok()) return Annotate(memory.status(), "--memory");
  if (*memory < kMinimumTaskMemory) {
    return absl::InvalidArgumentError(
        absl::StrCat("--memory ", flags.memory, ": no task runs with less than ", FormatByteSize(kMinimumTaskMemory)));
  }
  if (const uint64_t machine = MachineMemory(); *memory > machine) {
    return absl::InvalidArgumentError(
        absl::StrCat("--memory ", flags.memory, ": more than the ", FormatByteSize(machine), " that this machine has"));
  }
  settings.memory = *memory;
  if (!flags.available_for.empty()) {
    const absl::StatusOr<absl::Duration> available = ParseTimeOption(flags.available_for, absl::Milliseconds(1), kLongestAvailable);
    if (!available.ok()) return Annotate(available.status(), "--available-for");
    settings.available_for = *available;
  }
  QUERN_ASSIGN_OR_RETURN(settings.paths, ParseMaps(flags.maps));
  settings.spool = flags.spool.empty() ? DefaultSpool() : flags.spool;
  if (struct stat spool;
      stat(settings.spool.c_str(), &spool) != 0 || !S_ISDIR(spool.st_mode) || access(settings.spool.c_str(), W_OK | X_OK) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(flags.spool.empty() ? "$TMPDIR, where parts of shards go without --spool: " : "--spool ",
                                                   settings.spool, ": no directory in which files can be made"));
  }
  return settings;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0' ? name : "unknown-host";
}

// What was given for the machine, its own number, or what stands for it in a container: hashed, for it is nobody's business elsewhere.
std::string MachineIdentity(const std::string& given, const std::string& host) {
  constexpr size_t kDigits = 16;
  std::string id = given.empty() ? ReadFileToString("/etc/machine-id").value_or("") : given;
  absl::StripTrailingAsciiWhitespace(&id);
  const bool known = !given.empty() || (id.size() == 32 && std::all_of(id.begin(), id.end(), absl::ascii_isxdigit));
  return HexDigest(Sha256Of(absl::StrCat("quern-worker ", known ? id : host))).substr(0, kDigits);
}

// A random UUID (version 4).
absl::StatusOr<std::string> NewUuid() {
  std::array<unsigned char, 16> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return absl::InternalError("getrandom gave no random bytes");
  }
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const std::string hex = HexDigest(absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  return absl::StrCat(hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-", hex.substr(16, 4), "-", hex.substr(20));
}

// Unlike that of any other worker: containers may share a host's name and all be process 1.
std::string DefaultName(absl::string_view host, absl::string_view incarnation) {
  const std::string process = absl::StrCat("-", getpid(), "-", incarnation.substr(0, 8));
  const std::string name = absl::StrCat(host, process);
  return CheckWorkerName(name).ok() ? name : absl::StrCat("worker", process);
}

// The program's own file under its name, for the children. When it has been replaced since (an upgrade), the one that runs: both ends of
// the channel must be the same.
std::string OwnProgram() {
  constexpr char kSelf[] = "/proc/self/exe";
  char path[4096];
  const ssize_t length = readlink(kSelf, path, sizeof(path));
  if (length <= 0 || length == sizeof(path)) return kSelf;
  const std::string name(path, length);
  struct stat named, running;
  const bool same =
      stat(name.c_str(), &named) == 0 && stat(kSelf, &running) == 0 && named.st_dev == running.st_dev && named.st_ino == running.st_ino;
  return same ? name : kSelf;
}

// Keeps the process's memory near what is in use: the pool of the executor is the budget, and everything else has to be small.
void KeepHeapSmall() {
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 256 << 10);
}

void SetUpLog() {
  spdlog::set_default_logger(spdlog::stderr_logger_mt("quern-worker"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
}

// What an executor is started with, beside its channel: it has a connection of its own for what it does not see.
std::vector<std::string> ExecutorArguments(const Flags& flags, const Settings& settings) {
  std::vector<std::string> arguments = {OwnProgram(),   "--server",     flags.server,    "--spool",
                                        settings.spool, "--log-format", flags.log_format};
  const ChannelSecurity& security = flags.security;
  for (const auto& [flag, value] : {std::pair("--tls-ca", &security.tls.authority), std::pair("--tls-cert", &security.tls.certificate),
                                    std::pair("--tls-key", &security.tls.key), std::pair("--token-file", &security.token_file)}) {
    if (!value->empty()) arguments.insert(arguments.end(), {flag, *value});
  }
  for (const std::string& map : flags.maps) arguments.insert(arguments.end(), {"--map", map});
  return arguments;
}

int RunAsExecutor(const Flags& flags) {
  prctl(PR_SET_NAME, "quern-executor");
  PrepareExecutorProcess();
  const std::unique_ptr<DataPlane> data_plane = NewLinkDataPlane(flags.server, flags.security);
  PipelineSettings settings;
  settings.data_plane = data_plane.get();
  settings.spool = flags.spool;
  // The supervisor has checked them.
  settings.paths = ParseMaps(flags.maps).value_or(PathMap());
  const absl::Status status = RunExecutor(UniqueFd(flags.channel_fd), PipelineHooks(std::move(settings)));
  if (status.ok()) return kDone;
  spdlog::error("executor: {}", status.ToString());
  return kFailed;
}

quern::v1::Device CpuDevice() {
  quern::v1::Device device;
  device.set_kind("cpu");
  device.set_name(quant::KernelTarget());
  const absl::Status self_test = quant::SelfTest();
  device.set_self_test_passed(self_test.ok());
  if (!self_test.ok()) {
    device.set_self_test_detail(std::string(self_test.message()));
    spdlog::error("SELF-TEST FAILED, this worker takes no work: {}", self_test.ToString());
  }
  return device;
}

void Log(LogLevel level, const std::string& line) {
  switch (level) {
    case LogLevel::kInfo:
      return spdlog::info(line);
    case LogLevel::kWarning:
      return spdlog::warn(line);
    case LogLevel::kError:
      return spdlog::error(line);
  }
}

// Turns SIGTERM and SIGINT into requests while it lives. They must be blocked in every thread, which BlockSignals in main does.
class SignalThread {
 public:
  static void BlockSignals() {
    const sigset_t signals = Signals();
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  }

  explicit SignalThread(Supervisor* supervisor) : thread_([supervisor] { Serve(supervisor); }) {}
  ~SignalThread() {
    pthread_kill(thread_.native_handle(), kEnd);
    thread_.join();
  }

 private:
  static constexpr int kEnd = SIGUSR1;

  static sigset_t Signals() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int signal : {SIGTERM, SIGINT, kEnd}) sigaddset(&signals, signal);
    return signals;
  }

  static void Serve(Supervisor* supervisor) {
    const sigset_t signals = Signals();
    bool draining = false, stopping = false;
    while (true) {
      int signal = 0;
      if (sigwait(&signals, &signal) != 0 || signal == kEnd) return;
      if (signal == SIGTERM && !draining && !stopping) {
        draining = true;
        supervisor->RequestDrain();
      } else if (!stopping) {
        stopping = true;
        supervisor->RequestStop();
      } else {
        // Asked a third time: the executor ends with its channel.
        _exit(kFailed);
      }
    }
  }

  std::thread thread_;
};

absl::Status RunAsSupervisor(const Flags& flags, const Settings& settings) {
  SupervisorOptions options;
  options.info.host = HostName();
  options.info.machine = MachineIdentity(flags.machine, options.info.host);
  QUERN_ASSIGN_OR_RETURN(options.info.incarnation, NewUuid());
  options.info.name = flags.name.has_value() ? *flags.name : DefaultName(options.info.host, options.info.incarnation);
  options.info.version = QUERN_VERSION;
  options.info.numerics_version = quant::kNumericsVersion;
  options.info.threads = flags.threads;
  options.info.memory = settings.memory;
  options.info.reader = flags.reader;
  options.info.available_until = Clock::Real()->Monotonic() + settings.available_for;
  options.info.devices = {CpuDevice()};
  options.info.data_plane = true;
  options.paths = settings.paths;
  options.executor_argv = ExecutorArguments(flags, settings);
  options.transport = NewGrpcTransport(flags.server, flags.security);
  options.log = Log;
  spdlog::info("worker {} ({}) with {} and {} threads for {}", options.info.name, options.info.devices[0].name(),
               FormatByteSize(settings.memory), flags.threads, flags.server);
  const auto metrics = std::make_shared<WorkerMetrics>(options.info.slots, options.info.memory);
  options.metrics = metrics;
  std::unique_ptr<MetricsServer> metrics_server;
  if (!flags.metrics_address.empty()) {
    QUERN_ASSIGN_OR_RETURN(
        metrics_server,
        MetricsServer::Start(flags.metrics_address,
                             [metrics] {
                               std::vector<MetricFamily> families = metrics->Collect();
                               AddProcessMetrics("quern-worker", QUERN_VERSION, quant::kNumericsVersion, &families);
                               return families;
                             },
                             {.live = [metrics] { return metrics->Live(); }, .ready = [metrics] { return metrics->Ready(); }}));
    spdlog::info("{}", metrics_server->Describe());
  }
  Supervisor supervisor(std::move(options));
  SignalThread signals(&supervisor);
  const absl::Status end = supervisor.Run();
  spdlog::info("worker has left");
  return end;
}

int Main(int argc, char** argv) {
  KeepHeapSmall();
  // Abseil as distributions build it keeps a graph of all mutexes that a thread holds, and gRPC locks some at each call.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  SetUpLog();
  Flags flags;
  CLI::App app("Joins a coordinator (quernd) and does its tasks: reads weights, quantizes them, writes shards.", "quern-worker");
  app.set_version_flag("--version", absl::StrCat("quern-worker ", QUERN_VERSION));
  app.footer(
      "Memory: the buffer pool has --memory bytes; the whole worker stays within 100 MiB more.\n"
      "Signals: SIGTERM finishes what runs, then leaves; SIGINT or a second SIGTERM stops at once.\n"
      "Exit status: 0 it left as it was asked, 1 failed, 2 wrong flags, 3 the coordinator told it to stop (another worker has its "
      "name).\n\n"
      "Example:\n  quern-worker --server unix:/run/quern/quern.sock --memory 512MiB --threads 8 --name node7\n");
  app.add_option("--server", flags.server, "The coordinator: unix:/path or host:port");
  app.add_option("--tls-ca", flags.security.tls.authority, "Certificates of the authority that signed the coordinator's (PEM)")
      ->envname("QUERN_TLS_CA");
  app.add_option("--tls-cert", flags.security.tls.certificate, "This worker's certificate (PEM)")->envname("QUERN_TLS_CERT");
  app.add_option("--tls-key", flags.security.tls.key, "Its private key (PEM)")->envname("QUERN_TLS_KEY");
  app.add_option("--token-file", flags.security.token_file, "File that holds the token for the coordinator, and nothing else")
      ->envname("QUERN_TOKEN_FILE");
  app.add_option("--memory", flags.memory, "Bytes of the buffer pool, for example 512MiB or 2GB")->capture_default_str();
  app.add_option("--threads", flags.threads, "Threads that compute (default: the cores of this process)");
  app.add_option("--device", flags.device, "What computes: cpu")->capture_default_str();
  app.add_option("--reader", flags.reader, "How sources are read where a job does not say: auto, direct, buffered or mmap")
      ->capture_default_str();
  app.add_option(
      "--name", flags.name,
      "Name that the coordinator knows this worker by. Give one that is the same after a restart, and another to every worker of "
      "a machine (default: host, process number and a random part)");
  app.add_option("--machine", flags.machine,
                 "What names the machine, the same for all workers on it: they share its faults, and audits go to another one "
                 "(default: /etc/machine-id, else the host's name)")
      ->envname("QUERN_MACHINE");
  app.add_option("--available-for", flags.available_for,
                 "How long this machine will be there (90m, 11h30m): nothing is started that cannot end");
  app.add_option(
         "--map", flags.maps,
         "Where files of the coordinator are here: /its/path=/path/here. May be repeated, the longest that fits counts. What is not "
         "found is fetched from the coordinator, and shards are sent there")
      ->type_name("THEIRS=OURS")
      ->allow_extra_args(false);
  app.add_option("--spool", flags.spool,
                 "Directory for parts of shards that are sent to the coordinator and do not fit --memory (default: $TMPDIR or /tmp)");
  app.add_option("--metrics-listen", flags.metrics_address,
                 "host:port for Prometheus (GET /metrics); without TLS and tokens, so best a loopback address (default: none)")
      ->type_name("ADDR");
  app.add_option("--log-format", flags.log_format, "Lines of the log: text, or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  app.add_option("--parent-fd", flags.parent_fd, "Exit at once when this pipe closes")->group("");
  app.add_flag("--executor", flags.executor)->group("");
  app.add_option("--channel-fd", flags.channel_fd)->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kUsage;
  }
  if (const absl::Status given = CheckNoEmptyOption(app); !given.ok()) {
    std::cerr << "quern-worker: " << given.message() << "\nRun quern-worker --help for usage.\n";
    return kUsage;
  }
  if (flags.log_format == "json") spdlog::set_formatter(NewJsonLogFormatter("quern-worker"));
  if (flags.executor) {
    if (fcntl(flags.channel_fd, F_GETFD) >= 0) return RunAsExecutor(flags);
    std::cerr << "quern-worker: --executor is for quern-worker itself, which gives it a channel\n";
    return kUsage;
  }

  const absl::StatusOr<Settings> settings = CheckFlags(flags);
  if (!settings.ok()) {
    std::cerr << "quern-worker: " << settings.status().message() << "\nRun quern-worker --help for usage.\n";
    return kUsage;
  }
  // First, so that gRPC's threads have them blocked too.
  SignalThread::BlockSignals();
  // Never given back: when its last user is gone, gRPC ends its threads, and one that is polling makes that take ten seconds.
  grpc_init();
  // The executor ends with its channel.
  WatchParent(flags.parent_fd.value_or(-1), [] { _exit(kDone); });
  if (const absl::Status status = RunAsSupervisor(flags, *settings); !status.ok()) {
    if (absl::IsFailedPrecondition(status)) return kToldToStop;  // the supervisor has logged why
    spdlog::error("{}", status.ToString());
    return kFailed;
  }
  return kDone;
}

}  // namespace
}  // namespace quern::worker

int main(int argc, char** argv) { return quern::worker::Main(argc, argv); }
