// The program as a whole: quern-worker, its executor child and the pipeline, against a gRPC server that the test plays.
#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "base/subprocess.h"
#include "quant/numerics_version.h"
#include "worker/supervisor/test_coordinator.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptStatus;
using ::testing::HasSubstr;

constexpr uint64_t kHeaderSize = 4096;

// Writes one tensor of seeded weights.
quern::v1::TaskSpec GenerateTask(uint64_t elements) {
  quern::v1::TaskSpec spec;
  spec.set_label("model.safetensors");
  std::string header = absl::StrCat("{\"w\":{\"dtype\":\"BF16\",\"shape\":[", elements, "],\"data_offsets\":[0,", 2 * elements, "]}}");
  header.resize(kHeaderSize - 8, ' ');
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  quern::v1::WriteShard& shard = *spec.mutable_write_shard();
  shard.set_header(length + header);
  shard.set_file_size(kHeaderSize + 2 * elements);
  quern::v1::GenerateUnit& unit = *shard.add_units()->mutable_generate();
  unit.mutable_output()->set_name("w");
  unit.mutable_output()->set_dtype("BF16");
  unit.mutable_output()->add_shape(elements);
  unit.mutable_output()->set_offset(kHeaderSize);
  unit.mutable_output()->set_size(2 * elements);
  unit.set_seed(7);
  unit.set_distribution("normal");
  unit.set_standard_deviation(0.02);
  spec.set_bytes_to_write(kHeaderSize + 2 * elements);
  return spec;
}

// The value of a "Name: value kB" line of /proc/PID/status.
std::optional<uint64_t> StatusField(pid_t pid, const std::string& name) {
  const absl::StatusOr<std::string> text = ReadKernelFile(absl::StrCat("/proc/", pid, "/status"));
  if (!text.ok()) return std::nullopt;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    uint64_t value;
    if (!absl::ConsumePrefix(&line, name + ":")) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (!words.empty() && absl::SimpleAtoi(words[0], &value)) return value;
  }
  return std::nullopt;
}

std::vector<pid_t> ChildrenOf(pid_t parent) {
  std::vector<pid_t> children;
  for (const std::string& entry : ListDirectory("/proc").value_or(std::vector<std::string>())) {
    int pid;
    if (absl::SimpleAtoi(entry, &pid) && StatusField(pid, "PPid") == static_cast<uint64_t>(parent)) children.push_back(pid);
  }
  return children;
}

// Gone, or dead and waiting for whoever inherited it.
bool Gone(pid_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  const absl::StatusOr<std::string> text = ReadKernelFile(absl::StrCat("/proc/", pid, "/status"));
  return !text.ok() || absl::StrContains(*text, "State:\tZ");
}

void WaitUntilGone(pid_t pid) {
  while (!Gone(pid)) std::this_thread::yield();
}

class WorkerProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    QUERN_ASSERT_OK(dir_);
    Serve();
  }
  void Serve() {
    coordinator_.reset();
    coordinator_ = std::make_unique<TestCoordinator>(socket_path());
    ASSERT_TRUE(coordinator_->serving());
  }
  std::string socket_path() const { return JoinPath(dir_->path(), "s"); }
  std::string log_path() const { return JoinPath(dir_->path(), "log"); }
  std::string output_path() const { return JoinPath(dir_->path(), "attempt"); }

  Subprocess Spawn(std::vector<std::string> flags, bool tie_to_parent = false) {
    Subprocess::Options options;
    options.argv = {QUERN_TEST_WORKER};
    options.argv.insert(options.argv.end(), flags.begin(), flags.end());
    options.tie_to_parent = tie_to_parent;
    options.log_path = log_path();
    absl::StatusOr<Subprocess> child = Subprocess::Spawn(options);
    EXPECT_THAT(child, IsOk());
    return *std::move(child);
  }
  Subprocess SpawnWorker(bool tie_to_parent = false, const std::string& memory = "64MiB") {
    return Spawn({"--server", "unix:" + socket_path(), "--memory", memory, "--threads", "2", "--name", "w"}, tie_to_parent);
  }
  std::string Log() const { return ReadFileToString(log_path()).value_or(""); }

  void Want(uint32_t attempt, uint64_t elements) {
    quern::v1::DesiredAttempt desired;
    desired.mutable_id()->set_job("jobs/1");
    desired.mutable_id()->set_attempt(attempt);
    *desired.mutable_spec() = GenerateTask(elements);
    desired.set_output_path(output_path());
    coordinator_->Want(desired);
  }
  // An attempt that runs long enough to be disturbed; returns when it has written something.
  void StartLongAttempt(uint32_t attempt) {
    Want(attempt, uint64_t{4} << 30);
    coordinator_->WaitFor([&](const quern::v1::SynchronizeRequest& request) {
      return request.attempts_size() == 1 && request.attempts(0).id().attempt() == attempt && request.attempts(0).bytes_written() > 0;
    });
  }

  absl::StatusOr<TempDir> dir_ = TempDir::Make("worker_program");
  std::unique_ptr<TestCoordinator> coordinator_;
};

TEST_F(WorkerProgramTest, HelpHasAnExample) {
  Subprocess help = Spawn({"--help"});
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, help.Wait());
  EXPECT_EQ(state.ToString(), "exit status 0");
  EXPECT_THAT(Log(), HasSubstr("Example:"));
  EXPECT_THAT(Log(), testing::Not(HasSubstr("--channel-fd")));
}

TEST_F(WorkerProgramTest, UsageErrorsSayWhatIsWrong) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{}, "--server is needed"},
      {{"--server", "unix:/x", "--device", "cuda"}, "no CUDA backend"},
      {{"--server", "unix:/x", "--memory", "lots"}, "lots"},
      {{"--server", "unix:/x", "--memory", "1MiB"}, "16 MiB"},
      {{"--server", "unix:/x", "--memory", "0"}, "16 MiB"},
      {{"--server", "unix:/x", "--memory", "-512MiB"}, "--memory"},
      {{"--server", "unix:/x", "--memory", "1000TiB"}, "more than the "},
      {{"--server", "unix:/x", "--memory", "99999999999TiB"}, "--memory"},
      {{"--server", "unix:/x", "--threads", "0"}, "1 to 1024"},
      {{"--server", "unix:/x", "--threads", "-1"}, "1 to 1024"},
      {{"--server", "unix:/x", "--threads", "1000000"}, "1 to 1024"},
      {{"--server", "unix:/x", "--threads", "99999999999999999999"}, "--threads"},
      {{"--server", "unix:/x", "--threads", "two"}, "--threads"},
      {{"--server", "unix:/x", "--name", ""}, "--name: the value is empty"},
      {{"--server", "unix:/x", "--name="}, "--name"},
      {{"--server", "unix:/x", "--name", "a\nb"}, "controls the text"},
      {{"--server", "unix:/x", "--name", std::string(5000, 'x')}, "5000 bytes"},
      {{"--server", "unix:/x", "--name", "a\xff"}, "no UTF-8"},
      {{"--server", "unix:/x", "--available-for", "0s"}, "is no time"},
      {{"--server", "unix:/x", "--available-for", "-1h"}, "is no time"},
      {{"--server", "unix:/x", "--parent-fd", "-1"}, "--parent-fd"},
      {{"--server", "unix:/x", "--parent-fd", "777"}, "no such open file"},
      {{"--executor"}, "channel"},
      {{"--server", "unix:/x", "--reader", "telepathic"}, "telepathic"},
      {{"--server", "unix:/x", "--available-for", "soon"}, "soon"},
      {{"--server", "unix:/x", "--map", "/a"}, "/mnt/a=/mnt/b"},
      {{"--server", "unix:/x", "--map", "/a=/b", "--map", "/a=/c"}, "mapped twice"},
      {{"--server", "unix:/x", "--spool", "/nowhere"}, "no directory"},
      {{"--server", "unix:/" + std::string(120, 'x')}, "more than 107"},
      {{"--server", "unix:/x", "--nonsense"}, "--nonsense"},
  };
  for (const auto& [flags, message] : cases) {
    Subprocess child = Spawn(flags);
    QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, child.Wait());
    EXPECT_EQ(state.ToString(), "exit status 2") << message;
    EXPECT_THAT(Log(), HasSubstr(message));
    QUERN_ASSERT_OK(RemoveFile(log_path()));
  }
}

TEST_F(WorkerProgramTest, MissingTemporaryDirectoryIsCalledByItsVariable) {
  ASSERT_EQ(setenv("TMPDIR", "/nowhere", 1), 0);
  Subprocess child = Spawn({"--server", "unix:/x"});
  ASSERT_EQ(unsetenv("TMPDIR"), 0);
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, child.Wait());
  EXPECT_EQ(state.ToString(), "exit status 2");
  EXPECT_THAT(Log(), testing::AllOf(HasSubstr("$TMPDIR"), HasSubstr("/nowhere")));
}

TEST_F(WorkerProgramTest, SaysWhichMachineItWasTold) {
  Subprocess worker = Spawn({"--server", "unix:" + socket_path(), "--memory", "64MiB", "--name", "node7", "--machine", "rack7"});
  const quern::v1::SynchronizeRequest request =
      coordinator_->WaitFor([](const quern::v1::SynchronizeRequest& request) { return request.worker() == "node7"; });
  EXPECT_EQ(request.machine(), HexDigest(Sha256Of("quern-worker rack7")).substr(0, 16));
}

TEST_F(WorkerProgramTest, SaysWhoItIs) {
  Subprocess worker =
      Spawn({"--server", "unix:" + socket_path(), "--memory", "64MiB", "--threads", "3", "--name", "node7", "--available-for", "2h"});
  const quern::v1::SynchronizeRequest request =
      coordinator_->WaitFor([](const quern::v1::SynchronizeRequest& request) { return request.worker() == "node7"; });
  EXPECT_EQ(request.incarnation().size(), 36u);
  EXPECT_FALSE(request.host().empty());
  EXPECT_EQ(request.machine().size(), 16) << request.machine();
  EXPECT_EQ(request.numerics_version(), quant::kNumericsVersion);
  EXPECT_EQ(request.slots(), 1u);
  EXPECT_EQ(request.threads(), 3u);
  EXPECT_EQ(request.memory(), 64 * kMiB);
  ASSERT_EQ(request.devices_size(), 1);
  EXPECT_EQ(request.devices(0).kind(), "cpu");
  EXPECT_TRUE(request.devices(0).self_test_passed()) << request.devices(0).self_test_detail();
  EXPECT_GT(request.available_for().seconds(), 7000);
  EXPECT_LE(request.available_for().seconds(), 7200);
  QUERN_ASSERT_OK(worker.Kill(SIGTERM));
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, worker.Wait());
  EXPECT_EQ(state.ToString(), "exit status 0") << Log();
}

TEST_F(WorkerProgramTest, WritesAShardWithinItsMemory) {
  Subprocess worker = SpawnWorker();
  Want(1, 100'000'000);
  const AttemptStatus end = coordinator_->WaitForEnd(1);
  ASSERT_EQ(end.state(), AttemptStatus::COMPLETED) << end.failure().message();
  EXPECT_EQ(end.memory(), 64 * kMiB);
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string file, ReadFileToString(output_path()));
  EXPECT_EQ(file.size(), kHeaderSize + 200'000'000);
  EXPECT_EQ(HexDigest(end.result().sha256()), HexDigest(Sha256Of(file)));

  uint64_t peak_kib = StatusField(worker.pid(), "VmHWM").value_or(0);
  const std::vector<pid_t> children = ChildrenOf(worker.pid());
  ASSERT_EQ(children.size(), 1u);
  const uint64_t child_kib = StatusField(children[0], "VmHWM").value_or(0);
  RecordProperty("supervisor_peak_kib", std::to_string(peak_kib));
  RecordProperty("executor_peak_kib", std::to_string(child_kib));
  EXPECT_GT(peak_kib, 0u);
  EXPECT_GT(child_kib, 0u);
  EXPECT_LE((peak_kib + child_kib) * kKiB, 164 * kMiB) << "supervisor " << peak_kib << " KiB, executor " << child_kib << " KiB";
}

TEST_F(WorkerProgramTest, KilledExecutorIsReportedAndReplaced) {
  Subprocess worker = SpawnWorker();
  StartLongAttempt(1);
  const std::vector<pid_t> children = ChildrenOf(worker.pid());
  ASSERT_EQ(children.size(), 1u);
  ASSERT_EQ(kill(children[0], SIGKILL), 0);
  const AttemptStatus end = coordinator_->WaitForEnd(1);
  EXPECT_EQ(end.state(), AttemptStatus::FAILED);
  EXPECT_EQ(end.failure().reason(), quern::v1::EXECUTOR_DIED);
  EXPECT_EQ(end.failure().signal(), SIGKILL);
  EXPECT_EQ(end.memory(), 64 * kMiB);
  QUERN_ASSERT_OK(RemoveFile(output_path()));
  Want(2, 1000);
  EXPECT_EQ(coordinator_->WaitForEnd(2).state(), AttemptStatus::COMPLETED);
}

TEST_F(WorkerProgramTest, UnwantedAttemptStopsAndItsFileIsGone) {
  Subprocess worker = SpawnWorker();
  StartLongAttempt(1);
  coordinator_->Unwant(1);
  EXPECT_EQ(coordinator_->WaitForEnd(1).state(), AttemptStatus::STOPPED);
  EXPECT_FALSE(FileExists(output_path()));
}

TEST_F(WorkerProgramTest, CoordinatorThatRestartsIsToldWhatRuns) {
  Subprocess worker = SpawnWorker();
  StartLongAttempt(1);
  coordinator_.reset();
  Serve();
  // The new one does not know the attempt: it is told of it, and then has it stopped.
  coordinator_->WaitFor([](const quern::v1::SynchronizeRequest& request) { return request.attempts_size() == 1; });
  EXPECT_EQ(coordinator_->WaitForEnd(1).state(), AttemptStatus::STOPPED);
}

TEST_F(WorkerProgramTest, SigtermFinishesWhatRuns) {
  Subprocess worker = SpawnWorker();
  Want(1, 100'000'000);
  coordinator_->WaitFor([](const quern::v1::SynchronizeRequest& request) { return request.attempts_size() == 1; });
  QUERN_ASSERT_OK(worker.Kill(SIGTERM));
  EXPECT_EQ(coordinator_->WaitForEnd(1).state(), AttemptStatus::COMPLETED);
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, worker.Wait());
  EXPECT_EQ(state.ToString(), "exit status 0");
}

TEST_F(WorkerProgramTest, SigtermWithoutACoordinatorEndsAnIdleWorkerAtOnce) {
  Subprocess worker = SpawnWorker();
  coordinator_->WaitFor([](const quern::v1::SynchronizeRequest& request) { return request.worker() == "w"; });
  coordinator_.reset();
  while (!absl::StrContains(Log(), "does not answer")) std::this_thread::yield();
  const absl::Duration start = Clock::Real()->Monotonic();
  QUERN_ASSERT_OK(worker.Kill(SIGTERM));
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, worker.Wait());
  EXPECT_EQ(state.ToString(), "exit status 0");
  EXPECT_LT(Clock::Real()->Monotonic() - start, absl::Seconds(30));
}

TEST_F(WorkerProgramTest, SigtermReportsWhatWasFinishedWhileTheCoordinatorWasAway) {
  Subprocess worker = SpawnWorker();
  Want(1, 100'000'000);
  coordinator_->WaitFor([](const quern::v1::SynchronizeRequest& request) { return request.attempts_size() == 1; });
  coordinator_.reset();
  QUERN_ASSERT_OK(worker.Kill(SIGTERM));
  while (!absl::StrContains(Log(), "event=completed job=jobs/1 task=0 attempt=1")) std::this_thread::yield();
  Serve();
  EXPECT_EQ(coordinator_->WaitForEnd(1).state(), AttemptStatus::COMPLETED);
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, worker.Wait());
  EXPECT_EQ(state.ToString(), "exit status 0");
}

TEST_F(WorkerProgramTest, ToldToStopItSaysWhyAndEndsWithAStatusOfItsOwn) {
  Subprocess worker = SpawnWorker();
  StartLongAttempt(1);
  coordinator_->StopWorkers("another worker with the name w started");
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, worker.Wait());
  EXPECT_EQ(state.ToString(), "exit status 3");
  EXPECT_EQ(coordinator_->WaitForEnd(1).state(), AttemptStatus::STOPPED);
  EXPECT_THAT(Log(), HasSubstr("another worker with the name w started"));
  EXPECT_FALSE(FileExists(output_path()));
}

TEST_F(WorkerProgramTest, DefaultNamesDiffer) {
  std::set<std::string> names;
  for (int i = 0; i < 2; ++i) {
    Subprocess worker = Spawn({"--server", "unix:" + socket_path(), "--memory", "64MiB"});
    const quern::v1::SynchronizeRequest request = coordinator_->WaitFor(
        [&](const quern::v1::SynchronizeRequest& request) { return !request.worker().empty() && names.count(request.worker()) == 0; });
    names.insert(request.worker());
    EXPECT_THAT(request.worker(), HasSubstr(absl::StrCat("-", worker.pid(), "-")));
    QUERN_ASSERT_OK(worker.Kill(SIGTERM));
    QUERN_ASSERT_OK(worker.Wait());
  }
  EXPECT_EQ(names.size(), 2u);
}

TEST_F(WorkerProgramTest, SecondSigtermStopsAtOnce) {
  Subprocess worker = SpawnWorker();
  StartLongAttempt(1);
  QUERN_ASSERT_OK(worker.Kill(SIGTERM));
  coordinator_->WaitFor([](const quern::v1::SynchronizeRequest& request) { return request.draining(); });
  QUERN_ASSERT_OK(worker.Kill(SIGTERM));
  EXPECT_EQ(coordinator_->WaitForEnd(1).state(), AttemptStatus::STOPPED);
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, worker.Wait());
  EXPECT_EQ(state.ToString(), "exit status 0");
  EXPECT_FALSE(FileExists(output_path()));
}

TEST_F(WorkerProgramTest, SigintStopsAtOnce) {
  Subprocess worker = SpawnWorker();
  StartLongAttempt(1);
  QUERN_ASSERT_OK(worker.Kill(SIGINT));
  EXPECT_EQ(coordinator_->WaitForEnd(1).state(), AttemptStatus::STOPPED);
  QUERN_ASSERT_OK_AND_ASSIGN(const ExitState state, worker.Wait());
  EXPECT_EQ(state.ToString(), "exit status 0");
}

TEST_F(WorkerProgramTest, NothingIsLeftWhenTheParentIsGone) {
  Subprocess worker = SpawnWorker(/*tie_to_parent=*/true);
  StartLongAttempt(1);
  const std::vector<pid_t> children = ChildrenOf(worker.pid());
  ASSERT_EQ(children.size(), 1u);
  worker.CloseParentPipe();
  QUERN_ASSERT_OK(worker.Wait());
  WaitUntilGone(children[0]);
}

TEST_F(WorkerProgramTest, NoExecutorIsLeftWhenTheSupervisorIsKilled) {
  Subprocess worker = SpawnWorker();
  StartLongAttempt(1);
  const std::vector<pid_t> children = ChildrenOf(worker.pid());
  ASSERT_EQ(children.size(), 1u);
  QUERN_ASSERT_OK(worker.Kill(SIGKILL));
  QUERN_ASSERT_OK(worker.Wait());
  WaitUntilGone(children[0]);
}

}  // namespace
}  // namespace quern::worker
