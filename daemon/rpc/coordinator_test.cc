// The coordinator with its real parts, called through the real stubs over a unix socket. The test plays the worker.
#include "daemon/rpc/coordinator.h"

#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "daemon/queue/job_store.h"
#include "daemon/queue/names.h"
#include "daemon/rpc/commit_check.h"
#include "daemon/rpc/server.h"
#include "daemon/rpc/status.h"
#include "daemon/rpc/test_error_info.h"
#include "daemon/rpc/test_result.h"
#include "grpcpp/grpcpp.h"
#include "nlohmann/json.hpp"
#include "quant/numerics_version.h"
#include "quern/v1/jobs.grpc.pb.h"
#include "quern/v1/test_printer.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern::daemon {
namespace {

using quern::v1::AttemptStatus;
using quern::v1::CreateJobRequest;
using quern::v1::DesiredAttempt;
using quern::v1::Job;
using quern::v1::SynchronizeRequest;
using quern::v1::SynchronizeResponse;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

std::string Cwd() {
  char path[4096];
  EXPECT_NE(getcwd(path, sizeof(path)), nullptr);
  return path;
}

class CoordinatorTest : public testing::Test {
 protected:
  void SetUp() override {
    auto made = TempDir::Make("quern-rpc-test");
    ASSERT_THAT(made, IsOk());
    directory_ = std::make_unique<TempDir>(*std::move(made));
    source_ = JoinPath(directory_->path(), "src");
    output_ = JoinPath(directory_->path(), "out");
    // A copy: tests change it.
    const std::string original = JoinPath(Cwd(), "tests/data/laguna-micro");
    QUERN_ASSERT_OK(MakeDirectories(source_));
    QUERN_ASSERT_OK_AND_ASSIGN(const auto names, ListDirectory(original));
    for (const std::string& name : names) {
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(JoinPath(original, name)));
      QUERN_ASSERT_OK(WriteFileDurably(JoinPath(source_, name), content));
    }
    store_ = NewMemoryJobStore();
    Start();
  }

  void Start(PathPolicy paths = PathPolicy::Everything()) {
    CoordinatorOptions options;
    options.store = store_.get();
    options.clock = clock_;
    options.keep_jobs = keep_jobs_;
    options.keep_jobs_for = keep_jobs_for_;
    options.log = [this](const std::string& line) {
      MutexLock lock(&log_mutex_);
      log_.push_back(line);
    };
    options.owner = "the test";
    options.retry_backoff = retry_backoff_;
    options.publish = [this](const PublishRequest& request) {
      ++publishings_;
      if (publish_hook_) publish_hook_();
      if (publish_errors_ == 0) return PublishJob(request);
      --publish_errors_;
      return ErrnoToStatus(publish_errno_, "write", JoinPath(output_, "tokenizer.json"));
    };
    options.free_disk_space = [this](const std::string&) -> absl::StatusOr<uint64_t> { return free_disk_space_.load(); };
    options.paths = std::move(paths);
    options.recheck_interval = absl::Milliseconds(10);
    options.recheck_patience = recheck_patience_;
    auto coordinator = Coordinator::Start(std::move(options));
    ASSERT_THAT(coordinator, IsOk());
    coordinator_ = *std::move(coordinator);
    const std::string socket = JoinPath(directory_->path(), "s.sock");
    auto server = Server::Start(coordinator_.get(), {absl::StrCat("unix:", socket)});
    ASSERT_THAT(server, IsOk());
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials());
    jobs_ = quern::v1::Jobs::NewStub(channel_);
    workers_ = quern::v1::Workers::NewStub(channel_);
  }

  void Restart() {
    server_.reset();
    coordinator_.reset();
    Start();
  }

  void TearDown() override {
    server_.reset();
    coordinator_.reset();
  }

  CreateJobRequest Request() {
    CreateJobRequest request;
    request.set_request_id(absl::StrCat("request ", ++requests_));
    request.mutable_spec()->set_operation(quern::v1::QUANTIZE);
    request.mutable_spec()->set_output(output_);
    quern::v1::QuantizeSpec& quantize = *request.mutable_spec()->mutable_quantize();
    quantize.set_source(source_);
    quantize.set_scheme("W4A16_ASYM");
    quantize.set_group_size("32");
    quantize.add_targets("routed_experts");
    quantize.set_max_shard_size(512 * kKiB);
    return request;
  }

  grpc::Status Create(const CreateJobRequest& request, Job* job) {
    grpc::ClientContext context;
    return jobs_->CreateJob(&context, request, job);
  }
  Job MustCreate(const CreateJobRequest& request) {
    Job job;
    const grpc::Status status = Create(request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }
  Job Get(const std::string& name) {
    grpc::ClientContext context;
    quern::v1::GetJobRequest request;
    request.set_name(name);
    Job job;
    const grpc::Status status = jobs_->GetJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }
  // Waits on the stream of the job until it has ended.
  Job WaitForEnd(const std::string& name) {
    grpc::ClientContext context;
    quern::v1::WatchJobRequest request;
    request.set_name(name);
    const auto stream = jobs_->WatchJob(&context, request);
    Job job, last;
    while (stream->Read(&job)) {
      EXPECT_GE(job.revision(), last.revision());
      last = job;
    }
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return last;
  }

  SynchronizeRequest Worker() const {
    SynchronizeRequest request;
    request.set_worker("w");
    request.set_incarnation(incarnation_);
    request.set_host("host");
    request.set_version("1");
    request.set_numerics_version(quant::kNumericsVersion);
    request.set_slots(1);
    request.set_memory(512 * kMiB);
    return request;
  }

  SynchronizeResponse Sync(const SynchronizeRequest& request) {
    grpc::ClientContext context;
    SynchronizeResponse response;
    const grpc::Status status = workers_->Synchronize(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  static void Answer(const quern::v1::SightChallenge& challenge, SynchronizeRequest* request) {
    quern::v1::SightAnswer& answer = *request->add_sight();
    answer.set_job(challenge.job());
    answer.set_what(challenge.what());
    answer.set_nonce(challenge.nonce());
    const absl::StatusOr<UniqueFd> fd = OpenFile(challenge.path(), O_RDONLY);
    const absl::StatusOr<uint64_t> size = FileSize(challenge.path());
    if (!fd.ok() || !size.ok() || *size != challenge.size()) return;
    Sha256 sha;
    sha.Update(challenge.nonce());
    for (uint64_t offset : challenge.offsets()) {
      std::string sample(std::min<uint64_t>(4096, *size - offset), '\0');
      EXPECT_THAT(ReadExactly(fd->get(), offset, sample.data(), sample.size(), challenge.path()), IsOk());
      sha.Update(sample);
    }
    answer.set_seen(true);
    answer.set_digest(sha.Finish());
  }

  // Asks until an attempt is granted, answering challenges on the way.
  DesiredAttempt NextGrant(SynchronizeRequest request) {
    while (true) {
      const SynchronizeResponse response = Sync(request);
      for (const DesiredAttempt& attempt : response.attempts()) {
        if (attempt.has_spec()) return attempt;
      }
      request = Worker();
      request.set_may_wait(response.challenges().empty());
      for (const auto& challenge : response.challenges()) Answer(challenge, &request);
    }
  }

  // What a worker would write, as far as the coordinator looks at it.
  static AttemptStatus Execute(const DesiredAttempt& attempt) {
    const quern::v1::WriteShard& shard = attempt.spec().write_shard();
    std::string content = shard.header();
    content.resize(shard.file_size());
    EXPECT_THAT(WriteFileDurably(attempt.output_path(), content), IsOk());
    return CompletedWith(attempt, content);
  }

  // Runs so many tasks and takes no more.
  void RunTasks(uint32_t tasks) {
    SynchronizeRequest request = Worker();
    for (uint32_t i = 0; i < tasks; ++i) {
      const AttemptStatus status = Execute(NextGrant(request));
      request = Worker();
      *request.add_attempts() = status;
    }
    request.set_slots(0);
    EXPECT_THAT(Sync(request).acknowledged(), SizeIs(1));
  }

  // Runs so many audits on a worker of another name, and reports them.
  void RunAudits(uint32_t audits) {
    const auto auditor = [this] {
      SynchronizeRequest request = Worker();
      request.set_worker("auditor");
      return request;
    };
    SynchronizeRequest ask = auditor();
    for (uint32_t i = 0; i < audits; ++i) {
      SynchronizeRequest next = ask;
      DesiredAttempt audit;
      while (!audit.has_spec()) {
        const SynchronizeResponse response = Sync(next);
        for (const DesiredAttempt& attempt : response.attempts()) {
          if (attempt.has_spec()) audit = attempt;
        }
        next = auditor();
        for (const auto& challenge : response.challenges()) Answer(challenge, &next);
      }
      EXPECT_EQ(audit.purpose(), quern::v1::AUDIT);
      ask = auditor();
      *ask.add_attempts() = Execute(audit);
    }
    ask.set_slots(0);
    Sync(ask);
  }

  void WaitForLog(const std::string& text) {
    for (bool found = false; !found; std::this_thread::yield()) {
      MutexLock lock(&log_mutex_);
      for (const std::string& line : log_) found |= absl::StrContains(line, text);
    }
  }

  nlohmann::json RunJson() {
    auto text = ReadFileToString(JoinPath(output_, ".quern/run.json"));
    EXPECT_THAT(text, IsOk());
    return nlohmann::json::parse(text.value_or("{}"));
  }

  std::unique_ptr<TempDir> directory_;
  std::string source_, output_;
  ManualClock manual_clock_;
  Clock* clock_ = Clock::Real();
  size_t keep_jobs_ = SIZE_MAX;
  absl::Duration keep_jobs_for_ = absl::InfiniteDuration();
  Mutex log_mutex_;
  std::vector<std::string> log_ QUERN_GUARDED_BY(log_mutex_);
  std::unique_ptr<JobStore> store_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<quern::v1::Jobs::Stub> jobs_;
  std::unique_ptr<quern::v1::Workers::Stub> workers_;
  std::string incarnation_ = "first";
  int requests_ = 0;
  absl::Duration recheck_patience_ = absl::Minutes(10);
  absl::Duration retry_backoff_;
  std::atomic<uint64_t> free_disk_space_ = UINT64_MAX;
  std::atomic<int> publishings_ = 0;
  std::atomic<int> publish_errors_ = 0;  // still to come
  int publish_errno_ = EIO;
  std::function<void()> publish_hook_;  // before each
};

TEST_F(CoordinatorTest, JobGoesFromRequestToPublishedOutput) {
  const Job job = MustCreate(Request());
  EXPECT_EQ(job.state(), Job::QUEUED);
  const uint32_t tasks = job.progress().tasks_total();
  ASSERT_GT(tasks, 1);
  RunTasks(tasks);
  const Job done = WaitForEnd(job.name());
  EXPECT_EQ(done.state(), Job::SUCCEEDED) << done.error().message();
  EXPECT_EQ(done.progress().tasks_done(), tasks);
  EXPECT_GT(Get(job.name()).plan().source_files_size(), 0);

  const nlohmann::json run = RunJson();
  EXPECT_EQ(run["identity"], HexDigest(Get(job.name()).plan().identity()));
  EXPECT_EQ(run["grants"].size(), tasks);
  EXPECT_EQ(run["commits"].size(), tasks);
  QUERN_ASSERT_OK_AND_ASSIGN(const auto left, ListDirectory(JoinPath(output_, ".quern")));
  EXPECT_THAT(left, testing::ElementsAre("run.json"));
  EXPECT_TRUE(FileExists(JoinPath(output_, "config.json")));
  EXPECT_TRUE(FileExists(JoinPath(output_, "model.safetensors.index.json")));

  // The same again is there already.
  const Job again = MustCreate(Request());
  EXPECT_TRUE(again.already_done());
  EXPECT_EQ(again.state(), Job::SUCCEEDED);
  EXPECT_EQ(again.name(), job.name());
  // It was not audited, and is not said to be.
  CreateJobRequest audited = Request();
  audited.set_audit_fraction(1);
  Job unaudited;
  const grpc::Status differs = Create(audited, &unaudited);
  EXPECT_EQ(differs.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(differs.error_message(),
              testing::AllOf(testing::HasSubstr("--audit 100%, and it has 0% (jobs/"), testing::HasSubstr("--overwrite")));
  // Something else may not take its place.
  CreateJobRequest other = Request();
  other.mutable_spec()->mutable_quantize()->set_group_size("channel");
  Job refused;
  const grpc::Status status = Create(other, &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), testing::HasSubstr("recipe changed"));
  other.mutable_spec()->mutable_quantize()->set_overwrite(true);
  other.set_request_id("with overwrite");
  EXPECT_EQ(MustCreate(other).state(), Job::QUEUED);
}

TEST_F(CoordinatorTest, RequestWithOtherSettingsThanTheRunningJobSaysHowToChangeThem) {
  const Job job = MustCreate(Request());
  CreateJobRequest again = Request();
  again.set_audit_fraction(0.5);
  again.set_priority(3);
  Job refused;
  const grpc::Status status = Create(again, &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), testing::AllOf(testing::HasSubstr("--audit 50%, and it has 0%; --priority 3, and it has 0"),
                                                     testing::HasSubstr("quern pause " + job.name())));
  EXPECT_EQ(MustCreate(Request()).name(), job.name()) << "without them it is followed as it is";
  grpc::ClientContext context;
  quern::v1::PauseJobRequest pause;
  pause.set_name(job.name());
  Job paused;
  ASSERT_TRUE(jobs_->PauseJob(&context, pause, &paused).ok());
  again.set_request_id("after the pause");
  const Job changed = MustCreate(again);
  EXPECT_EQ(changed.name(), job.name());
  EXPECT_EQ(changed.priority(), 3);
  EXPECT_EQ(changed.audit_fraction(), 0.5);
  // A request that does not speak of audits keeps them, one that says none does not.
  for (const bool says : {false, true}) {
    grpc::ClientContext again_context;
    ASSERT_TRUE(jobs_->PauseJob(&again_context, pause, &paused).ok());
    CreateJobRequest silent = Request();
    silent.set_request_id(absl::StrCat("silent ", says));
    if (says) silent.set_audit_fraction(0);
    const Job resumed = MustCreate(silent);
    EXPECT_EQ(resumed.name(), job.name());
    EXPECT_EQ(resumed.audit_fraction(), says ? 0 : 0.5);
    EXPECT_EQ(resumed.progress().tasks_to_audit(), says ? 0 : changed.progress().tasks_to_audit());
  }
}

TEST_F(CoordinatorTest, SyntheticOutputIsRecognisedAndMayBeReplaced) {
  const auto request = [this](uint64_t seed, bool overwrite) {
    CreateJobRequest create;
    create.set_request_id(absl::StrCat("synthesize ", ++requests_));
    create.mutable_spec()->set_operation(quern::v1::SYNTHESIZE);
    create.mutable_spec()->set_output(output_);
    quern::v1::SynthesizeSpec& synthesize = *create.mutable_spec()->mutable_synthesize();
    synthesize.set_family("llama");
    synthesize.set_layers(1);
    synthesize.set_hidden(64);
    synthesize.set_intermediate(64);
    synthesize.set_vocab(64);
    synthesize.set_seed(seed);
    synthesize.set_overwrite(overwrite);
    return create;
  };
  const Job job = MustCreate(request(1, false));
  RunTasks(job.progress().tasks_total());
  const Job done = WaitForEnd(job.name());
  ASSERT_EQ(done.state(), Job::SUCCEEDED) << done.error().message();
  EXPECT_TRUE(MustCreate(request(1, false)).already_done());
  Job refused;
  const grpc::Status other = Create(request(2, false), &refused);
  EXPECT_EQ(other.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(other.error_message(), HasSubstr("--overwrite"));
  EXPECT_EQ(MustCreate(request(2, true)).state(), Job::QUEUED);
}

TEST_F(CoordinatorTest, FileOfSomebodyElseIsRefusedBeforeTheWork) {
  const Job job = MustCreate(Request());
  RunTasks(job.progress().tasks_total());
  ASSERT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  // Now the source has a file that the old output lacks, and the user has one of that name there.
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(source_, "merges.txt"), "of the source"));
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(output_, "merges.txt"), "mine"));
  CreateJobRequest again = Request();
  again.mutable_spec()->mutable_quantize()->set_overwrite(true);
  Job refused;
  const grpc::Status status = Create(again, &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(status.error_message(), HasSubstr("merges.txt was not written by Quern"));
}

TEST_F(CoordinatorTest, SameRequestIdIsTheSameJob) {
  const CreateJobRequest request = Request();
  const Job job = MustCreate(request);
  EXPECT_EQ(MustCreate(request).name(), job.name());
  Restart();
  EXPECT_EQ(MustCreate(request).name(), job.name());
}

TEST_F(CoordinatorTest, FailedAttemptIsTriedAgain) {
  const Job job = MustCreate(Request());
  const DesiredAttempt first = NextGrant(Worker());
  EXPECT_EQ(first.id().attempt(), 1);
  SynchronizeRequest failed = Worker();
  AttemptStatus& status = *failed.add_attempts();
  *status.mutable_id() = first.id();
  status.set_state(AttemptStatus::FAILED);
  status.mutable_failure()->set_reason(quern::v1::IO_ERROR);
  status.mutable_failure()->set_message("read error");
  const DesiredAttempt second = NextGrant(failed);
  EXPECT_EQ(second.id().task(), first.id().task());
  EXPECT_EQ(second.id().attempt(), 2);
  grpc::ClientContext context;
  quern::v1::ListTasksRequest list;
  list.set_parent(job.name());
  list.set_page_size(1);
  quern::v1::ListTasksResponse page;
  ASSERT_TRUE(jobs_->ListTasks(&context, list, &page).ok());
  ASSERT_THAT(page.tasks(), SizeIs(1));
  EXPECT_EQ(page.next_page_token(), "1");
  EXPECT_THAT(page.tasks(0).attempts(), SizeIs(2));
  EXPECT_EQ(page.tasks(0).attempts(0).message(), "read error");
}

TEST_F(CoordinatorTest, FileThatDiffersFromTheReportIsNotCommitted) {
  const Job job = MustCreate(Request());
  const DesiredAttempt attempt = NextGrant(Worker());
  AttemptStatus status = Execute(attempt);
  ASSERT_EQ(truncate(attempt.output_path().c_str(), 100), 0);
  SynchronizeRequest request = Worker();
  request.set_slots(0);
  *request.add_attempts() = status;
  Sync(request);
  EXPECT_EQ(Get(job.name()).progress().tasks_done(), 0);
}

TEST_F(CoordinatorTest, ReportThatDoesNotFitThePlanIsNotCommitted) {
  const Job job = MustCreate(Request());
  DesiredAttempt attempt = NextGrant(Worker());
  AttemptStatus good = Execute(attempt);
  uint32_t tasks_done = 0;  // those that quantize nothing
  for (; good.result().errors_size() == 0; ++tasks_done) {
    SynchronizeRequest next = Worker();
    *next.add_attempts() = good;
    attempt = NextGrant(next);
    good = Execute(attempt);
  }
  QUERN_EXPECT_OK(CheckReport(attempt.spec(), good.result()));
  const double nan = std::nan(""), infinity = HUGE_VAL;
  using Result = quern::v1::TaskResult;
  const std::vector<std::pair<std::string, std::function<void(Result*)>>> wrong = {
      {"SHA-256 has 31 bytes", [](Result* result) { result->mutable_sha256()->pop_back(); }},
      {"no digest of", [](Result* result) { result->clear_source_digests(); }},
      {"no digest of", [](Result* result) { result->mutable_source_digests()->RemoveLast(); }},
      {"has 3 bytes, not 16", [](Result* result) { result->mutable_source_digests(0)->set_digest("abc"); }},
      {"a digest too many, of other", [](Result* result) { result->mutable_source_digests(0)->set_tensor("other"); }},
      {"a digest too many", [](Result* result) { *result->add_source_digests() = Result(*result).source_digests(0); }},
      {"no error figures of", [](Result* result) { result->clear_errors(); }},
      {"figures too many, of other", [](Result* result) { result->mutable_errors(0)->set_module("other"); }},
      {"figures too many", [](Result* result) { *result->add_errors() = Result(*result).errors(0); }},
      {"cannot be", [](Result* result) { result->mutable_errors(0)->set_count(1); }},
      {"cannot be", [](Result* result) { result->mutable_errors(0)->set_nonfinite(UINT64_MAX); }},
      {"cannot be", [&](Result* result) { result->mutable_errors(0)->set_sum_squares(nan); }},
      {"cannot be", [&](Result* result) { result->mutable_errors(0)->set_sum_squares(infinity); }},
      {"cannot be", [&](Result* result) { result->mutable_errors(0)->set_sum_squared_error(infinity); }},
      {"cannot be", [](Result* result) { result->mutable_errors(0)->set_sum_squared_error(-1); }},
      {"cannot be", [&](Result* result) { result->mutable_errors(0)->set_max_abs_error(nan); }},
  };
  for (const auto& [what, garble] : wrong) {
    Result result = good.result();
    garble(&result);
    EXPECT_THAT(CheckReport(attempt.spec(), result), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(what)));
  }
  // Scales that are powers of two may decode to infinity.
  quern::v1::TaskSpec powers = attempt.spec();
  for (quern::v1::ShardUnit& unit : *powers.mutable_write_shard()->mutable_units()) {
    if (unit.has_quantize()) {
      unit.mutable_quantize()->set_scheme("float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0");
    }
  }
  Result infinite = good.result();
  infinite.mutable_errors(0)->set_sum_squared_error(infinity);
  infinite.mutable_errors(0)->set_max_abs_error(infinity);
  QUERN_EXPECT_OK(CheckReport(powers, infinite));
  infinite.mutable_errors(0)->set_max_abs_error(nan);
  EXPECT_THAT(CheckReport(powers, infinite), StatusIs(absl::StatusCode::kDataLoss));

  SynchronizeRequest request = Worker();
  request.set_slots(0);
  *request.add_attempts() = good;
  request.mutable_attempts(0)->mutable_result()->clear_source_digests();
  Sync(request);
  WaitForLog("no digest of");
  EXPECT_EQ(Get(job.name()).progress().tasks_done(), tasks_done);
  RunTasks(job.progress().tasks_total() - tasks_done);
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
}

TEST_F(CoordinatorTest, ReportThatWasCommittedUnseenIsNamedAndItsTaskDoneAgain) {
  const Job job = MustCreate(Request());
  RunTasks(job.progress().tasks_total() - 1);
  server_.reset();
  coordinator_.reset();
  QUERN_ASSERT_OK_AND_ASSIGN(const uint64_t id, ParseJobName(job.name()));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, store_->Get(TaskKey('r', id, 1)));
  quern::v1::TaskResult result;
  ASSERT_TRUE(result.ParseFromString(text));
  result.clear_source_digests();
  QUERN_ASSERT_OK(store_->WriteSync({{StoreWrite::Kind::kPut, TaskKey('r', id, 1), result.SerializeAsString()}}));
  incarnation_ = "second";
  Start();
  RunTasks(1);
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_THAT(failed.error().message(), testing::AllOf(HasSubstr(absl::StrCat(job.name(), "/tasks/1")), HasSubstr("worker w (attempt 1)"),
                                                       HasSubstr("no digest of"), HasSubstr("quern retry")));
  grpc::ClientContext context;
  quern::v1::RetryJobRequest retry;
  retry.set_name(job.name());
  Job running;
  ASSERT_TRUE(jobs_->RetryJob(&context, retry, &running).ok());
  EXPECT_EQ(running.progress().tasks_done(), job.progress().tasks_total() - 1);
  RunTasks(1);
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
}

TEST_F(CoordinatorTest, UnfinishedJobIsResumedAndKeepsWhatIsDone) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  Restart();
  incarnation_ = "second";
  const Job resumed = MustCreate(Request());
  EXPECT_EQ(resumed.name(), job.name());
  EXPECT_EQ(resumed.progress().tasks_done(), 1);
  RunTasks(resumed.progress().tasks_total() - 1);
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  const nlohmann::json run = RunJson();
  EXPECT_EQ(run["commits"].size(), resumed.progress().tasks_total());
  std::map<int, int> committed;
  for (const auto& commit : run["commits"]) committed[commit["task"]] = commit["seq"];
  for (const auto& grant : run["grants"]) EXPECT_LT(grant["seq"], committed[grant["task"]]) << "a finished task was done again";
}

TEST_F(CoordinatorTest, FileOfSomebodyElseStopsAResumedJobBeforeTheWork) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(output_, "config.json"), "mine"));
  Restart();
  incarnation_ = "second";
  Job refused;
  const grpc::Status status = Create(Request(), &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(status.error_message(), HasSubstr("config.json was not written by Quern"));
  QUERN_ASSERT_OK(RemoveFile(JoinPath(output_, "config.json")));
  EXPECT_EQ(MustCreate(Request()).progress().tasks_done(), 1) << "nothing is lost";
}

TEST_F(CoordinatorTest, OtherOptionsDoNotResumeAJob) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  CreateJobRequest other = Request();
  other.mutable_spec()->mutable_quantize()->set_group_size("channel");
  Job refused;
  const grpc::Status status = Create(other, &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonIn(status), "IDENTITY_CHANGED");
  EXPECT_THAT(status.error_message(), HasSubstr("recipe"));
  other.mutable_spec()->mutable_quantize()->set_overwrite(true);
  const Job fresh = MustCreate(other);
  EXPECT_NE(fresh.name(), job.name());
  EXPECT_EQ(fresh.progress().tasks_done(), 0);
  EXPECT_EQ(NextGrant(Worker()).id().attempt(), 2) << "no file of the old job may have the same name";
}

TEST_F(CoordinatorTest, VerifySourceDoesNotTrustARunWithoutDigests) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  CreateJobRequest verifying = Request();
  verifying.mutable_spec()->mutable_quantize()->set_verify_source(true);
  Job refused;
  const grpc::Status unfinished = Create(verifying, &refused);
  EXPECT_EQ(unfinished.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(unfinished.error_message(),
              testing::AllOf(HasSubstr("no digests of the whole source"), HasSubstr("--overwrite to start over")));
  RunTasks(job.progress().tasks_total() - 1);
  ASSERT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  const grpc::Status finished = Create(verifying, &refused);
  EXPECT_EQ(finished.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(finished.error_message(),
              testing::AllOf(HasSubstr("no digests of the whole source"), HasSubstr("--overwrite to start over")));
  EXPECT_TRUE(MustCreate(Request()).already_done());
}

TEST_F(CoordinatorTest, SourceThatChangedBetweenRunsIsNoticedBeforeAnythingIsReused) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  // Other weights under the same header and size.
  const std::string shard = JoinPath(source_, "model-00002-of-00003.safetensors");
  QUERN_ASSERT_OK_AND_ASSIGN(std::string content, ReadFileToString(shard));
  for (size_t i = content.size() / 2; i < content.size(); ++i) content[i] ^= 1;
  QUERN_ASSERT_OK(WriteFileDurably(shard, content));
  server_.reset();
  coordinator_.reset();
  incarnation_ = "second";
  Start();
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "SOURCE_CHANGED");
  EXPECT_THAT(failed.error().message(), HasSubstr("model-00002-of-00003.safetensors"));
  Job refused;
  EXPECT_EQ(Create(Request(), &refused).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(CoordinatorTest, WorkerThatSaysTheSourceChangedIsBelievedOnlyIfItDid) {
  const Job job = MustCreate(Request());
  const auto report = [this](quern::v1::FailureReason reason) {
    const DesiredAttempt attempt = NextGrant(Worker());
    SynchronizeRequest request = Worker();
    request.set_slots(0);
    quern::v1::AttemptStatus& status = *request.add_attempts();
    *status.mutable_id() = attempt.id();
    status.set_state(quern::v1::AttemptStatus::FAILED);
    status.mutable_failure()->set_reason(reason);
    status.mutable_failure()->set_message("so I say");
    Sync(request);
  };
  report(quern::v1::SOURCE_CHANGED);
  EXPECT_EQ(Get(job.name()).state(), Job::RUNNING);
  report(quern::v1::DISK_FULL);
  EXPECT_EQ(Get(job.name()).state(), Job::RUNNING) << "there is room";
  for (int i = 1; i <= 3; ++i) {
    const std::string shard = JoinPath(source_, absl::StrCat("model-0000", i, "-of-00003.safetensors"));
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(shard));
    QUERN_ASSERT_OK(WriteFileDurably(shard, content + "x"));
  }
  report(quern::v1::SOURCE_CHANGED);
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "SOURCE_CHANGED");
  EXPECT_THAT(failed.error().message(),
              testing::AllOf(HasSubstr("source file " + source_ + "/model-0000"), HasSubstr("its size changed from")));
}

TEST_F(CoordinatorTest, FilesThatAreAwayAfterARestartAreWaitedFor) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  server_.reset();
  coordinator_.reset();
  const std::string away = source_ + ".away";
  ASSERT_EQ(rename(source_.c_str(), away.c_str()), 0);
  incarnation_ = "second";
  Start();
  WaitForLog("event=waits_for_files");
  EXPECT_EQ(Get(job.name()).state(), Job::RUNNING);
  ASSERT_EQ(rename(away.c_str(), source_.c_str()), 0);
  RunTasks(job.progress().tasks_total() - 1);
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
}

TEST_F(CoordinatorTest, FilesThatStayAwayAfterARestartFailTheJobUntilItIsRetried) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  server_.reset();
  coordinator_.reset();
  const std::string away = source_ + ".away";
  ASSERT_EQ(rename(source_.c_str(), away.c_str()), 0);
  incarnation_ = "second";
  recheck_patience_ = absl::ZeroDuration();
  Start();
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "IO_ERROR");
  ASSERT_EQ(rename(away.c_str(), source_.c_str()), 0);
  grpc::ClientContext context;
  quern::v1::RetryJobRequest retry;
  retry.set_name(job.name());
  Job running;
  EXPECT_TRUE(jobs_->RetryJob(&context, retry, &running).ok());
  RunTasks(job.progress().tasks_total() - 1);
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
}

TEST_F(CoordinatorTest, PublishingThatMeetsIoErrorsIsTriedAgainLaterEachTime) {
  clock_ = &manual_clock_;
  retry_backoff_ = absl::Seconds(1);
  publish_errors_ = 2;
  Restart();
  const Job job = MustCreate(Request());
  RunTasks(job.progress().tasks_total());
  WaitForLog("wait=1s message=\"write");
  EXPECT_EQ(Get(job.name()).state(), Job::PUBLISHING);
  EXPECT_EQ(publishings_, 1);
  manual_clock_.Advance(absl::Seconds(1));
  WaitForLog("wait=2s message=\"write");
  manual_clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  EXPECT_EQ(publishings_, 3);
}

TEST_F(CoordinatorTest, PublishingThatKeepsFailingFailsTheJobUntilItIsRetried) {
  publish_errno_ = ESTALE;
  publish_errors_ = 4;
  const Job job = MustCreate(Request());
  RunTasks(job.progress().tasks_total());
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "IO_ERROR");
  EXPECT_THAT(failed.error().message(), testing::AllOf(HasSubstr("failed 3 times"), HasSubstr("out/tokenizer.json: Stale file handle")));
  EXPECT_EQ(publishings_, 3);
  grpc::ClientContext context;
  quern::v1::RetryJobRequest retry;
  retry.set_name(job.name());
  Job publishing;
  EXPECT_TRUE(jobs_->RetryJob(&context, retry, &publishing).ok());
  // The count begins anew: one error is left.
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  EXPECT_EQ(publishings_, 5);
}

TEST_F(CoordinatorTest, RetryOfASucceededJobTakesNothing) {
  const Job job = MustCreate(Request());
  RunTasks(job.progress().tasks_total());
  ASSERT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  grpc::ClientContext context;
  quern::v1::RetryJobRequest retry;
  retry.set_name(job.name());
  Job answer;
  EXPECT_THAT(jobs_->RetryJob(&context, retry, &answer).error_message(), HasSubstr("has succeeded"));
  EXPECT_THAT(ListDirectory(JoinPath(output_, ".quern")), IsOkAndHolds(testing::ElementsAre("run.json")));
}

TEST_F(CoordinatorTest, PublishingOnAFullDiskFailsTheJobAtOnce) {
  publish_errno_ = ENOSPC;
  publish_errors_ = 1;
  const Job job = MustCreate(Request());
  RunTasks(job.progress().tasks_total());
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "DISK_FULL");
  EXPECT_EQ(publishings_, 1);
}

TEST_F(CoordinatorTest, OutputThatCannotBeWrittenIsNotSaidToBeInUse) {
  // In the way of the claim's record.
  QUERN_ASSERT_OK(MakeDirectories(JoinPath(output_, ".quern/owner.json.tmp")));
  Job refused;
  const grpc::Status status = Create(Request(), &refused);
  EXPECT_THAT(status.error_message(), HasSubstr("owner.json.tmp"));
  EXPECT_EQ(ReasonIn(status), "");
}

TEST_F(CoordinatorTest, SourceThatChangedDuringTheJobIsNoticedBeforePublishing) {
  const Job job = MustCreate(Request());
  const std::string shard = JoinPath(source_, "model-00001-of-00003.safetensors");
  QUERN_ASSERT_OK_AND_ASSIGN(std::string content, ReadFileToString(shard));
  content.back() ^= 1;
  RunTasks(job.progress().tasks_total() - 1);
  const DesiredAttempt last = NextGrant(Worker());
  QUERN_ASSERT_OK(WriteFileDurably(shard, content));
  SynchronizeRequest request = Worker();
  request.set_slots(0);
  *request.add_attempts() = Execute(last);
  Sync(request);
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "SOURCE_CHANGED");
  EXPECT_FALSE(FileExists(JoinPath(output_, "config.json")));
}

TEST_F(CoordinatorTest, ShardThatIsGoneOrEmptyBetweenRunsIsWrittenAgain) {
  const Job job = MustCreate(Request());
  RunTasks(3);
  server_.reset();
  coordinator_.reset();
  QUERN_ASSERT_OK(RemoveFile(AttemptPath(output_, 0, 1)));
  ASSERT_EQ(truncate(AttemptPath(output_, 1, 1).c_str(), 0), 0);
  incarnation_ = "second";
  Start();
  const Job resumed = MustCreate(Request());
  EXPECT_EQ(resumed.progress().tasks_done(), 1);
  RunTasks(resumed.progress().tasks_total() - 1);
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
}

TEST_F(CoordinatorTest, LinkThatTookThePlaceOfTheOutputIsNoChangeOfTheSource) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  server_.reset();
  coordinator_.reset();
  const std::string away = output_ + ".away";
  ASSERT_EQ(rename(output_.c_str(), away.c_str()), 0);
  ASSERT_EQ(symlink(away.c_str(), output_.c_str()), 0);
  incarnation_ = "second";
  Start();
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "IO_ERROR") << failed.error().message();
}

TEST_F(CoordinatorTest, CancelledJobCanBeDeletedAndLeavesNothing) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  quern::v1::DeleteJobRequest remove;
  remove.set_name(job.name());
  quern::v1::DeleteJobResponse removed;
  {
    grpc::ClientContext context;
    EXPECT_EQ(jobs_->DeleteJob(&context, remove, &removed).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  }
  {
    grpc::ClientContext context;
    quern::v1::CancelJobRequest cancel;
    cancel.set_name(job.name());
    Job cancelled;
    ASSERT_TRUE(jobs_->CancelJob(&context, cancel, &cancelled).ok());
    EXPECT_EQ(cancelled.state(), Job::CANCELLED);
  }
  grpc::ClientContext context;
  const grpc::Status status = jobs_->DeleteJob(&context, remove, &removed);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_FALSE(FileExists(output_)) << "the output was made for the job";
}

TEST_F(CoordinatorTest, DeleteThatFailsIsAskedForAgain) {
  const Job job = MustCreate(Request());
  RunTasks(1);
  {
    grpc::ClientContext context;
    quern::v1::CancelJobRequest cancel;
    cancel.set_name(job.name());
    Job cancelled;
    ASSERT_TRUE(jobs_->CancelJob(&context, cancel, &cancelled).ok());
  }
  // A directory cannot be removed as the file of this name would be.
  const std::string sight = SightPath(output_);
  QUERN_ASSERT_OK(RemoveFile(sight));
  QUERN_ASSERT_OK(MakeDirectories(JoinPath(sight, "inner")));
  quern::v1::DeleteJobRequest remove;
  remove.set_name(job.name());
  quern::v1::DeleteJobResponse removed;
  {
    grpc::ClientContext context;
    EXPECT_FALSE(jobs_->DeleteJob(&context, remove, &removed).ok());
  }
  EXPECT_EQ(Get(job.name()).state(), Job::CANCELLED) << "the job is there still";
  QUERN_ASSERT_OK(RemoveTree(sight));
  {
    grpc::ClientContext context;
    const grpc::Status status = jobs_->DeleteJob(&context, remove, &removed);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_FALSE(FileExists(output_));
  EXPECT_NE(MustCreate(Request()).name(), job.name()) << "the output is free";
}

// What a stranger with the right to write above the output may do at any time.
class PlantedLinkTest : public CoordinatorTest, public testing::WithParamInterface<const char*> {
 protected:
  void Plant() {
    for (const char* name : {"attempts/0.1", ".quern/attempts/0.1", "0.1", "sight", "config.json"}) {
      QUERN_ASSERT_OK(MakeDirectories(DirName(JoinPath(victim_, name))));
      QUERN_ASSERT_OK(WriteFileDurably(JoinPath(victim_, name), "mine"));
    }
    before_ = Victim();
    ASSERT_EQ(rename(planted_.c_str(), away_.c_str()), 0);
    ASSERT_EQ(symlink(victim_.c_str(), planted_.c_str()), 0);
  }
  void Unplant() {
    EXPECT_EQ(Victim(), before_);
    ASSERT_EQ(unlink(planted_.c_str()), 0);
    ASSERT_EQ(rename(away_.c_str(), planted_.c_str()), 0);
  }
  // Its names and contents.
  std::string Victim() {
    std::string found;
    for (const char* directory : {"", ".quern", ".quern/attempts", "attempts"}) {
      const std::vector<std::string> names = ListDirectory(JoinPath(victim_, directory)).value();
      for (const std::string& name : names) {
        const std::string path = JoinPath(JoinPath(victim_, directory), name);
        absl::StrAppend(&found, path, "=", ReadFileToString(path).value_or("-"), ";");
      }
    }
    return found;
  }
  Job Cancel(const std::string& name) {
    grpc::ClientContext context;
    quern::v1::CancelJobRequest cancel;
    cancel.set_name(name);
    Job cancelled;
    EXPECT_TRUE(jobs_->CancelJob(&context, cancel, &cancelled).ok());
    return cancelled;
  }
  grpc::Status Delete(const std::string& name) {
    grpc::ClientContext context;
    quern::v1::DeleteJobRequest remove;
    remove.set_name(name);
    quern::v1::DeleteJobResponse removed;
    return jobs_->DeleteJob(&context, remove, &removed);
  }

  std::string planted_, victim_, away_, before_;
};

TEST_P(PlantedLinkTest, IsNotFollowedAtACommitAPublishingARestartOrADelete) {
  victim_ = JoinPath(directory_->path(), "victim");
  away_ = JoinPath(directory_->path(), "away");
  planted_ = JoinPath(output_, GetParam());
  if (planted_.back() == '/') planted_.pop_back();
  const Job job = MustCreate(Request());
  const uint32_t tasks = job.progress().tasks_total();
  RunTasks(1);
  // Between attempts: what is reported there is not taken.
  DesiredAttempt grant = NextGrant(Worker());
  SynchronizeRequest request = Worker();
  *request.add_attempts() = Execute(grant);
  request.set_slots(0);
  Plant();
  Sync(request);
  EXPECT_EQ(Get(job.name()).progress().tasks_done(), 1);
  Unplant();
  RunTasks(tasks - 2);
  // At the publishing, which the last commit begins.
  publish_hook_ = [this] { Plant(); };
  RunTasks(1);
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_THAT(failed.error().message(), HasSubstr("symbolic link"));
  EXPECT_EQ(Victim(), before_);
  publish_hook_ = nullptr;
  // At a delete. A link in place of the attempts goes as they would.
  const bool deleted = Delete(job.name()).ok();
  EXPECT_EQ(deleted, GetParam() == absl::string_view(".quern/attempts"));
  EXPECT_EQ(Victim(), before_);
  if (deleted) return;
  // At a restart, which claims the output again.
  Restart();
  EXPECT_FALSE(Delete(job.name()).ok());
  Unplant();
  EXPECT_TRUE(Delete(job.name()).ok());
  EXPECT_FALSE(FileExists(JoinPath(output_, ".quern/attempts")));
}

INSTANTIATE_TEST_SUITE_P(Places, PlantedLinkTest, testing::Values("", ".quern", ".quern/attempts"));

TEST_F(CoordinatorTest, MistypedOptionsAreToldAsSuch) {
  const std::vector<std::function<void(CreateJobRequest&)>> mistakes = {
      [](auto& r) { r.mutable_spec()->mutable_quantize()->set_scheme("W9A16"); },
      [](auto& r) { r.mutable_spec()->mutable_quantize()->set_targets(0, "re:("); },
      [](auto& r) { r.mutable_spec()->mutable_quantize()->add_ignore("re:["); },
      [](auto& r) { r.mutable_spec()->mutable_quantize()->set_group_size("7x"); },
      [](auto& r) {
        r.mutable_spec()->set_operation(quern::v1::SYNTHESIZE);
        r.mutable_spec()->mutable_synthesize()->set_family("foo");
        r.mutable_spec()->mutable_synthesize()->set_layers(1);
      }};
  for (const auto& mistake : mistakes) {
    CreateJobRequest request = Request();
    mistake(request);
    Job job;
    const grpc::Status status = Create(request, &job);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_EQ(ReasonIn(status), "BAD_OPTION") << status.error_message();
  }
  // A mistake in the recipe's file, and targets that match nothing, are none of the command line.
  CreateJobRequest request = Request();
  request.mutable_spec()->mutable_quantize()->set_recipe("no: recipe");
  Job job;
  EXPECT_EQ(ReasonIn(Create(request, &job)), "");
  request = Request();
  request.mutable_spec()->mutable_quantize()->set_targets(0, "no.such.module");
  EXPECT_EQ(ReasonIn(Create(request, &job)), "");
}

TEST_F(CoordinatorTest, OutputsLieOutsideOfSourcesAndOtherOutputs) {
  const auto refused = [&](const std::string& source, const std::string& output) {
    CreateJobRequest request = Request();
    request.mutable_spec()->mutable_quantize()->set_source(source);
    request.mutable_spec()->mutable_quantize()->set_overwrite(true);
    request.mutable_spec()->set_output(output);
    Job job;
    const grpc::Status status = Create(request, &job);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    return status.error_message();
  };
  EXPECT_THAT(refused(source_, source_), HasSubstr("is the source"));
  EXPECT_THAT(refused(source_, JoinPath(source_, "a/out")), HasSubstr("inside the source"));
  const std::string link = JoinPath(directory_->path(), "link");
  ASSERT_EQ(symlink(source_.c_str(), link.c_str()), 0);
  EXPECT_THAT(refused(link, JoinPath(source_, "out")), HasSubstr("inside the source"));
  EXPECT_THAT(refused(source_, directory_->path()), HasSubstr("inside the output"));
  const Job job = MustCreate(Request());
  EXPECT_THAT(refused(source_, JoinPath(output_, "second")), HasSubstr("an output of Quern itself"));
  RunTasks(job.progress().tasks_total());
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  EXPECT_THAT(refused(source_, JoinPath(output_, "second/third")), HasSubstr("an output of Quern itself"));
}

TEST_F(CoordinatorTest, IdleConnectionDoesNotHoldUpTheEnd) {
  const Job job = MustCreate(Request());  // the channel stays open, and nothing polls it
  const absl::Duration start = Clock::Real()->Monotonic();
  server_->Shutdown();
  EXPECT_LT(Clock::Real()->Monotonic() - start, absl::Seconds(3));
}

TEST_F(CoordinatorTest, AddressesAreToldWithTheirPortAndWhyTheyCannotBeHad) {
  auto first = Server::Start(coordinator_.get(), {"127.0.0.1:0"});
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT((*first)->addresses(), SizeIs(1));
  const std::string address = (*first)->addresses()[0];
  EXPECT_THAT(address, testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
  const absl::Status taken = Server::Start(coordinator_.get(), {address}).status();
  EXPECT_THAT(std::string(taken.message()), testing::AllOf(HasSubstr(address), HasSubstr("Address already in use")));
}

TEST_F(CoordinatorTest, MissingRootNamesItsFlag) {
  EXPECT_THAT(PathPolicy::Below({"/no/such/root"}).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("--allow-root /no/such/root")));
}

TEST_F(CoordinatorTest, FullDiskReportedByAWorkerFailsTheJobAndItCompletesLater) {
  const Job job = MustCreate(Request());
  free_disk_space_ = Get(job.name()).plan().output_bytes() - 1;
  const DesiredAttempt attempt = NextGrant(Worker());
  SynchronizeRequest failed = Worker();
  failed.set_slots(0);
  AttemptStatus& status = *failed.add_attempts();
  *status.mutable_id() = attempt.id();
  status.set_state(AttemptStatus::FAILED);
  status.mutable_failure()->set_reason(quern::v1::DISK_FULL);
  Sync(failed);
  const Job stopped = WaitForEnd(job.name());
  EXPECT_EQ(stopped.error().reason(), "DISK_FULL");
  EXPECT_THAT(stopped.error().message(), HasSubstr(absl::StrCat("needs ", Get(job.name()).plan().output_bytes(), " bytes")));
  EXPECT_EQ(MustCreate(Request()).state(), Job::RUNNING);
  RunTasks(job.progress().tasks_total());
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
}

TEST_F(CoordinatorTest, PathsOutsideOfTheRootsAreRefused) {
  server_.reset();
  coordinator_.reset();
  QUERN_ASSERT_OK_AND_ASSIGN(PathPolicy below, PathPolicy::Below({directory_->path()}));
  Start(std::move(below));
  CreateJobRequest request = Request();
  request.mutable_spec()->set_output("/etc/quern-out");
  Job job;
  const grpc::Status status = Create(request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(ReasonIn(status), "PATH_NOT_ALLOWED");
  // A link inside that leads outside.
  ASSERT_EQ(symlink("/etc", JoinPath(directory_->path(), "link").c_str()), 0);
  request.mutable_spec()->set_output(JoinPath(directory_->path(), "link/out"));
  EXPECT_EQ(Create(request, &job).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  request.mutable_spec()->set_output(JoinPath(directory_->path(), "missing/../../../etc/out"));
  EXPECT_EQ(Create(request, &job).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.mutable_spec()->set_output("out");
  EXPECT_EQ(Create(request, &job).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  // So are files that a recipe needs.
  request = Request();
  request.mutable_spec()->mutable_quantize()->set_activation_scales("/etc/passwd");
  EXPECT_EQ(ReasonIn(Create(request, &job)), "PATH_NOT_ALLOWED");
  request = Request();
  request.mutable_spec()->mutable_quantize()->set_importance(JoinPath(directory_->path(), "link/passwd"));
  EXPECT_EQ(ReasonIn(Create(request, &job)), "PATH_NOT_ALLOWED");
  request = Request();
  request.mutable_spec()->set_operation(quern::v1::DEQUANTIZE);
  request.mutable_spec()->mutable_dequantize()->set_source("/etc");
  EXPECT_EQ(ReasonIn(Create(request, &job)), "PATH_NOT_ALLOWED");
  EXPECT_EQ(MustCreate(Request()).state(), Job::QUEUED);
}

TEST_F(CoordinatorTest, StoredJobsAreBoundToTheRootsOfTheNewCoordinator) {
  const Job job = MustCreate(Request());
  RunTasks(2);
  const std::string shard = AttemptPath(output_, 0, 1);
  const std::string elsewhere = JoinPath(directory_->path(), "elsewhere");
  QUERN_ASSERT_OK(MakeDirectories(elsewhere));
  const auto restart_below = [this](const std::string& root) {
    server_.reset();
    coordinator_.reset();
    auto below = PathPolicy::Below({root});
    ASSERT_THAT(below, IsOk());
    Start(*std::move(below));
  };
  const auto retry = [&] {
    grpc::ClientContext context;
    quern::v1::RetryJobRequest request;
    request.set_name(job.name());
    Job answer;
    return jobs_->RetryJob(&context, request, &answer);
  };
  const auto remove = [&] {
    grpc::ClientContext context;
    quern::v1::DeleteJobRequest request;
    request.set_name(job.name());
    quern::v1::DeleteJobResponse answer;
    return jobs_->DeleteJob(&context, request, &answer);
  };
  // A worker has something to tell of it.
  const DesiredAttempt held = NextGrant(Worker());
  restart_below(elsewhere);
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "PATH_NOT_ALLOWED");
  EXPECT_THAT(failed.error().message(), HasSubstr(output_));
  SynchronizeRequest late = Worker();
  late.set_slots(0);
  *late.add_attempts() = Execute(held);
  Sync(late);
  EXPECT_EQ(ReasonIn(retry()), "PATH_NOT_ALLOWED");
  EXPECT_EQ(ReasonIn(remove()), "PATH_NOT_ALLOWED");
  EXPECT_TRUE(FileExists(shard));
  EXPECT_EQ(Get(job.name()).progress().tasks_done(), 2);
  // The output is allowed, the source is not.
  restart_below(output_);
  EXPECT_EQ(ReasonIn(retry()), "PATH_NOT_ALLOWED");
  EXPECT_TRUE(FileExists(shard));
  // Under roots that hold both it goes on.
  restart_below(directory_->path());
  const grpc::Status resumed = retry();
  EXPECT_TRUE(resumed.ok()) << resumed.error_message();
  incarnation_ = "second";
  RunTasks(job.progress().tasks_total() - 2);
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
}

TEST_F(CoordinatorTest, PlanStreamsEveryTensorOnce) {
  grpc::ClientContext context;
  quern::v1::PlanJobRequest request;
  *request.mutable_spec() = Request().spec();
  const auto stream = jobs_->PlanJob(&context, request);
  quern::v1::PlanJobResponse response;
  quern::v1::PlanSummary summary;
  std::set<std::string> tensors;
  size_t fates = 0;
  while (stream->Read(&response)) {
    if (response.has_summary()) summary = response.summary();
    for (const auto& fate : response.fates()) tensors.insert(fate.tensor());
    fates += response.fates_size();
  }
  const grpc::Status status = stream->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(tensors.size(), fates);
  EXPECT_EQ(fates, summary.quantized_tensors() + summary.copied_tensors() + summary.dropped_size());
  EXPECT_FALSE(FileExists(output_));
}

TEST_F(CoordinatorTest, InspectAnswers) {
  grpc::ClientContext context;
  quern::v1::InspectCheckpointRequest request;
  request.set_path(source_);
  quern::v1::InspectCheckpointResponse response;
  const grpc::Status status = jobs_->InspectCheckpoint(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.files(), 3);
}

TEST_F(CoordinatorTest, AuditedTaskIsRunByAnotherWorkerAndLeavesNoFile) {
  CreateJobRequest request = Request();
  request.set_audit_fraction(1);
  const Job job = MustCreate(request);
  EXPECT_EQ(job.audit_fraction(), 1);
  EXPECT_EQ(job.numerics_version(), quant::kNumericsVersion);
  const uint32_t tasks = job.progress().tasks_total();
  RunTasks(tasks);
  EXPECT_EQ(Get(job.name()).state(), Job::RUNNING);
  EXPECT_EQ(Get(job.name()).progress().tasks_to_audit(), tasks);
  RunAudits(tasks);
  const Job ended = WaitForEnd(job.name());
  EXPECT_EQ(ended.state(), Job::SUCCEEDED) << ended.error().message();
  EXPECT_EQ(ended.progress().tasks_audited(), tasks);
  EXPECT_FALSE(FileExists(JoinPath(output_, ".quern/attempts")));
  int audits = 0;
  const nlohmann::json run = RunJson();
  for (const auto& grant : run.at("grants")) audits += grant.at("purpose") == "audit";
  EXPECT_EQ(audits, static_cast<int>(tasks));
  EXPECT_EQ(run.at("commits").size(), tasks);
}

TEST_F(CoordinatorTest, AuditReadsTheCommittedFileBack) {
  CreateJobRequest request = Request();
  request.set_audit_fraction(1);
  const Job job = MustCreate(request);
  const uint32_t tasks = job.progress().tasks_total();
  RunTasks(tasks);
  // One byte of it is lost on the disk; size and header are as they were.
  const std::string path = AttemptPath(output_, 0, 1);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('x');
  }
  RunAudits(1);
  const Job failed = WaitForEnd(job.name());
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "DATA_LOSS");
  EXPECT_THAT(failed.error().message(),
              testing::AllOf(HasSubstr(path), HasSubstr("worker w (attempt 1) has stored"), HasSubstr("auditor")));
}

TEST_F(CoordinatorTest, AuditsOutsideOfTheRangeOrOfAVerificationAreRefused) {
  CreateJobRequest request = Request();
  request.set_audit_fraction(1.5);
  Job job;
  const grpc::Status status = Create(request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonIn(status), "BAD_OPTION");
  request = Request();
  request.mutable_spec()->set_operation(quern::v1::VERIFY);
  request.mutable_spec()->mutable_verify();
  request.set_audit_fraction(0.5);
  EXPECT_THAT(Create(request, &job).error_message(), HasSubstr("verification"));
}

TEST_F(CoordinatorTest, JobOfOtherNumericsIsNotResumed) {
  const Job job = MustCreate(Request());
  server_.reset();
  coordinator_.reset();
  const std::string key = JobKey('j', 1);
  quern::store::JobRecord record;
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, store_->Get(key));
  ASSERT_TRUE(record.ParseFromString(text));
  EXPECT_EQ(record.numerics_version(), quant::kNumericsVersion);
  record.set_numerics_version(77);
  QUERN_ASSERT_OK(store_->WriteSync({{StoreWrite::Kind::kPut, key, record.SerializeAsString()}}));
  Start();
  const Job ended = WaitForEnd(job.name());
  EXPECT_EQ(ended.state(), Job::FAILED);
  EXPECT_EQ(ended.error().reason(), "NUMERICS_CHANGED");
  EXPECT_THAT(ended.error().message(), HasSubstr(absl::StrCat("numerics version 77, this coordinator has ", quant::kNumericsVersion)));
}

TEST_F(CoordinatorTest, WorkersAreCordonedAndDrainedByName) {
  Sync(Worker());
  quern::v1::Worker worker;
  quern::v1::CordonWorkerRequest cordon;
  cordon.set_name("workers/w");
  cordon.set_reason("fan");
  grpc::ClientContext first;
  ASSERT_TRUE(jobs_->CordonWorker(&first, cordon, &worker).ok());
  EXPECT_EQ(worker.state(), "cordoned");
  EXPECT_EQ(worker.detail(), "cordoned: fan");
  quern::v1::UncordonWorkerRequest uncordon;
  uncordon.set_name("workers/w");
  grpc::ClientContext second;
  ASSERT_TRUE(jobs_->UncordonWorker(&second, uncordon, &worker).ok());
  EXPECT_EQ(worker.state(), "ready");
  quern::v1::DrainWorkerRequest drain;
  drain.set_name("workers/w");
  grpc::ClientContext third;
  ASSERT_TRUE(jobs_->DrainWorker(&third, drain, &worker).ok());
  EXPECT_EQ(worker.state(), "draining");
  EXPECT_EQ(Sync(Worker()).desired_state(), quern::v1::DRAIN);
  for (const char* reason : {"a\nb", "a\u202eb"}) {
    cordon.set_reason(reason);
    grpc::ClientContext context;
    EXPECT_EQ(jobs_->CordonWorker(&context, cordon, &worker).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  cordon.set_reason("");
  cordon.set_name("workers/nobody");
  grpc::ClientContext fourth;
  EXPECT_EQ(jobs_->CordonWorker(&fourth, cordon, &worker).error_code(), grpc::StatusCode::NOT_FOUND);
  cordon.set_name("nobody");
  grpc::ClientContext fifth;
  EXPECT_EQ(jobs_->CordonWorker(&fifth, cordon, &worker).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(CoordinatorTest, EndedJobsExpireWithWhatTheyLeft) {
  clock_ = &manual_clock_;
  keep_jobs_ = 1;
  Restart();
  const Job first = MustCreate(Request());
  grpc::ClientContext context;
  quern::v1::CancelJobRequest cancel;
  cancel.set_name(first.name());
  Job job;
  ASSERT_TRUE(jobs_->CancelJob(&context, cancel, &job).ok());
  EXPECT_TRUE(FileExists(JoinPath(output_, ".quern/attempts")));
  manual_clock_.Advance(absl::Minutes(2));
  output_ = JoinPath(directory_->path(), "another");
  const Job second = MustCreate(Request());
  RunTasks(second.progress().tasks_total());
  EXPECT_EQ(WaitForEnd(second.name()).state(), Job::SUCCEEDED);
  manual_clock_.Advance(absl::Minutes(2));
  WaitForLog(absl::StrCat("event=expired job=", first.name()));
  EXPECT_FALSE(FileExists(JoinPath(directory_->path(), "out/.quern/attempts")));
  EXPECT_EQ(Get(second.name()).state(), Job::SUCCEEDED) << "the newest is kept";
}

TEST_F(CoordinatorTest, WallClockThatJumpsMakesNoJobExpire) {
  clock_ = &manual_clock_;
  keep_jobs_for_ = absl::Hours(24);
  Restart();
  const Job job = MustCreate(Request());
  RunTasks(job.progress().tasks_total());
  EXPECT_EQ(WaitForEnd(job.name()).state(), Job::SUCCEEDED);
  manual_clock_.JumpWall(absl::Hours(24 * 365));
  manual_clock_.Advance(absl::Minutes(2));
  WaitForLog("the wall clock has jumped");
  EXPECT_EQ(Get(job.name()).state(), Job::SUCCEEDED);
  manual_clock_.Advance(absl::Hours(25));
  WaitForLog("event=expired");
}

TEST_F(CoordinatorTest, UnknownJobsAndNamesAreErrors) {
  for (const auto& [name, code] :
       std::map<std::string, grpc::StatusCode>{{"jobs/77", grpc::StatusCode::NOT_FOUND}, {"job 1", grpc::StatusCode::INVALID_ARGUMENT}}) {
    grpc::ClientContext get, watch;
    quern::v1::GetJobRequest request;
    request.set_name(name);
    Job job;
    EXPECT_EQ(jobs_->GetJob(&get, request, &job).error_code(), code);
    quern::v1::WatchJobRequest watched;
    watched.set_name(name);
    const auto stream = jobs_->WatchJob(&watch, watched);
    EXPECT_FALSE(stream->Read(&job));
    EXPECT_EQ(stream->Finish().error_code(), code);
  }
}

TEST_F(CoordinatorTest, ListJobsGoesPageByPage) {
  for (const char* output : {"a", "b", "c"}) {
    CreateJobRequest request = Request();
    request.mutable_spec()->set_output(JoinPath(directory_->path(), output));
    MustCreate(request);
  }
  std::vector<std::string> names;
  quern::v1::ListJobsRequest request;
  request.set_page_size(2);
  do {
    grpc::ClientContext context;
    quern::v1::ListJobsResponse response;
    ASSERT_TRUE(jobs_->ListJobs(&context, request, &response).ok());
    for (const Job& job : response.jobs()) names.push_back(job.name());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(names, testing::ElementsAre("jobs/1", "jobs/2", "jobs/3"));
}

TEST_F(CoordinatorTest, IdleWorkerWaitsAndGetsTheJobThatComes) {
  SynchronizeRequest idle = Worker();
  idle.set_may_wait(true);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  SynchronizeResponse response;
  grpc::Status status;
  const auto call = workers_->AsyncSynchronize(&context, idle, &queue);
  call->Finish(&response, &status, nullptr);
  MustCreate(Request());
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.challenges(), SizeIs(2)) << "source and output";
}

TEST_F(CoordinatorTest, ShutdownEndsStreamsAndLongPolls) {
  const Job job = MustCreate(Request());
  grpc::ClientContext context;
  quern::v1::WatchJobRequest watch;
  watch.set_name(job.name());
  const auto stream = jobs_->WatchJob(&context, watch);
  Job seen;
  ASSERT_TRUE(stream->Read(&seen));
  server_->Shutdown();
  while (stream->Read(&seen)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(ServerOptionsTest, OtherMachinesNeedTlsAndTokens) {
  ServerOptions open, tokens, tls, both;
  tokens.token_file = both.token_file = "/etc/quern/tokens";
  tls.tls = both.tls = {.authority = "ca.pem", .certificate = "cert.pem", .key = "key.pem"};
  const auto check = [](ServerOptions options, const char* address) {
    options.addresses = {address};
    return CheckServerOptions(options);
  };
  for (const char* local : {"unix:/run/q.sock", "127.0.0.1:7450", "localhost:0", "[::1]:7450"}) {
    for (const ServerOptions& options : {open, tokens, tls, both}) EXPECT_THAT(check(options, local), IsOk()) << local;
  }
  for (const char* remote : {"0.0.0.0:7450", "[::]:7450", ":7450", "10.0.0.1:7450", "127.evil.example:1"}) {
    EXPECT_THAT(check(open, remote), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("neither TLS nor tokens"))) << remote;
    EXPECT_THAT(check(tokens, remote), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("in the clear"))) << remote;
    EXPECT_THAT(check(tls, remote), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("Give --token-file"))) << remote;
    EXPECT_THAT(check(both, remote), IsOk()) << remote;
  }
  for (const char* wrong : {"unix:q.sock", "7450", "127.0.0.1:99999", "127.0.0.1:http"}) {
    EXPECT_THAT(check(both, wrong), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--listen"))) << wrong;
  }
  both.tls.key.clear();
  EXPECT_THAT(check(both, "127.0.0.1:1"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("go together")));
}

class UnixSocketTest : public testing::Test {
 protected:
  void SetUp() override {
    auto made = TempDir::Make("quern-socket-test");
    ASSERT_THAT(made, IsOk());
    directory_ = std::make_unique<TempDir>(*std::move(made));
    path_ = JoinPath(directory_->path(), "s.sock");
  }
  UniqueFd Bind() {
    UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path_.data(), path_.size());
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }
  std::unique_ptr<TempDir> directory_;
  std::string path_;
};

TEST_F(UnixSocketTest, StaleSocketMakesWay) {
  Bind();
  QUERN_EXPECT_OK(PrepareUnixSocket(path_));
  EXPECT_FALSE(FileExists(path_));
  QUERN_EXPECT_OK(PrepareUnixSocket(path_));
}

TEST_F(UnixSocketTest, LiveSocketIsLeftAlone) {
  const UniqueFd fd = Bind();
  ASSERT_EQ(listen(fd.get(), 1), 0);
  EXPECT_THAT(PrepareUnixSocket(path_), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("another coordinator")));
  EXPECT_TRUE(FileExists(path_));
}

TEST_F(UnixSocketTest, OtherFilesAndLongPathsAreRefused) {
  QUERN_ASSERT_OK(WriteFileDurably(path_, "precious"));
  EXPECT_THAT(PrepareUnixSocket(path_), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no socket")));
  EXPECT_THAT(PrepareUnixSocket(JoinPath(directory_->path(), std::string(120, 'x'))), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(PrepareUnixSocket(JoinPath(directory_->path(), "none/s.sock")), StatusIs(absl::StatusCode::kNotFound));
}

TEST(CheckContentTest, WholeFileIsReadUntilItIsToStop) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir directory, TempDir::Make("quern-content-test"));
  const std::string path = JoinPath(directory.path(), "file");
  const std::string content((3 << 20) + 5, 'x');
  QUERN_ASSERT_OK(WriteFileDurably(path, content));
  int asked = 0;
  const auto go_on = [&] { return ++asked < 0; };
  QUERN_EXPECT_OK(CheckContent(path, Sha256Of(content), go_on));
  EXPECT_EQ(asked, 4);
  EXPECT_THAT(CheckContent(path, Sha256Of("other"), go_on), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("not")));
  EXPECT_THAT(CheckContent(path, Sha256Of(content), [&] { return ++asked > 0; }), StatusIs(absl::StatusCode::kCancelled, testing::_));
  EXPECT_EQ(asked, 9) << "it stops where it is";
}

}  // namespace
}  // namespace quern::daemon
