// The data plane of a real coordinator: its calls through real stubs, its connections over the same unix socket. The test plays a worker
// without files.
#include "daemon/rpc/data_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/link/dial.h"
#include "base/link/frame.h"
#include "base/link/ticket.h"
#include "base/status_matchers.h"
#include "daemon/publish/publish.h"
#include "daemon/queue/job_store.h"
#include "daemon/rpc/server.h"
#include "daemon/rpc/test_error_info.h"
#include "daemon/rpc/test_result.h"
#include "grpcpp/grpcpp.h"
#include "quant/numerics_version.h"
#include "quern/v1/jobs.grpc.pb.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern::daemon {
namespace {

using quern::v1::AttemptStatus;
using quern::v1::DesiredAttempt;
using quern::v1::Job;
using quern::v1::SynchronizeRequest;
using quern::v1::SynchronizeResponse;
using Kind = LinkFrame::Kind;
using testing::HasSubstr;

UniqueFd ConnectTo(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

class DataServiceTest : public testing::Test {
 protected:
  void SetUp() override {
    source_ = JoinPath(directory_.path(), "src");
    output_ = JoinPath(directory_.path(), "out");
    const std::string original = "tests/data/laguna-micro";
    QUERN_ASSERT_OK(MakeDirectories(source_));
    QUERN_ASSERT_OK_AND_ASSIGN(const auto names, ListDirectory(original));
    for (const std::string& name : names) {
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(JoinPath(original, name)));
      QUERN_ASSERT_OK(WriteFileDurably(JoinPath(source_, name), content));
    }
    store_ = NewMemoryJobStore();
    Start();
  }
  void TearDown() override { Stop(); }

  void Start() {
    CoordinatorOptions options;
    options.store = store_.get();
    options.clock = Clock::Real();
    options.owner = "the test";
    auto coordinator = Coordinator::Start(std::move(options));
    ASSERT_THAT(coordinator, IsOk());
    coordinator_ = *std::move(coordinator);
    address_ = absl::StrCat("unix:", JoinPath(directory_.path(), "s.sock"));
    ServerOptions server_options;
    server_options.addresses = {address_};
    server_options.token_file = token_file_;
    auto server = Server::Start(coordinator_.get(), std::move(server_options));
    ASSERT_THAT(server, IsOk());
    server_ = *std::move(server);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
    jobs_ = quern::v1::Jobs::NewStub(channel);
    workers_ = quern::v1::Workers::NewStub(channel);
    data_ = quern::v1::Data::NewStub(channel);
  }
  void Stop() {
    server_.reset();
    coordinator_.reset();
  }

  // As the owner of the token that is set, if there is one.
  void SignIn(grpc::ClientContext& context) const {
    if (!token_.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token_));
  }

  Job Create() {
    quern::v1::CreateJobRequest request;
    request.set_request_id("request");
    request.mutable_spec()->set_operation(quern::v1::QUANTIZE);
    request.mutable_spec()->set_output(output_);
    quern::v1::QuantizeSpec& quantize = *request.mutable_spec()->mutable_quantize();
    quantize.set_source(source_);
    quantize.set_scheme("W4A16_ASYM");
    quantize.set_group_size("32");
    quantize.add_targets("routed_experts");
    quantize.set_max_shard_size(512 * kKiB);
    grpc::ClientContext context;
    SignIn(context);
    Job job;
    const grpc::Status status = jobs_->CreateJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }
  Job Get(const std::string& name) {
    grpc::ClientContext context;
    quern::v1::GetJobRequest request;
    request.set_name(name);
    Job job;
    EXPECT_TRUE(jobs_->GetJob(&context, request, &job).ok());
    return job;
  }

  static SynchronizeRequest Worker(bool data_plane = true) {
    SynchronizeRequest request;
    request.set_worker("elsewhere");
    request.set_incarnation("first");
    request.set_host("host");
    request.set_version("1");
    request.set_numerics_version(quant::kNumericsVersion);
    request.set_slots(1);
    request.set_memory(512 * kMiB);
    request.set_data_plane(data_plane);
    return request;
  }
  SynchronizeResponse Sync(const SynchronizeRequest& request) {
    grpc::ClientContext context;
    SignIn(context);
    SynchronizeResponse response;
    const grpc::Status status = workers_->Synchronize(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  // Says that it sees nothing, until an attempt is granted.
  DesiredAttempt NextGrant(SynchronizeRequest request = Worker()) {
    while (true) {
      const SynchronizeResponse response = Sync(request);
      for (const DesiredAttempt& attempt : response.attempts()) {
        if (attempt.has_spec()) return attempt;
      }
      request = Worker();
      request.set_may_wait(response.challenges().empty());
      for (const auto& challenge : response.challenges()) {
        quern::v1::SightAnswer& answer = *request.add_sight();
        answer.set_job(challenge.job());
        answer.set_what(challenge.what());
        answer.set_nonce(challenge.nonce());
        answer.set_detail("not here");
      }
    }
  }

  // A data connection, as a client sees it.
  static std::unique_ptr<LinkConnection> Dial(const std::string& address, const std::string& ticket) {
    auto connection = LinkDialer(address, {}).Dial(ticket, absl::Seconds(60), [] { return true; });
    EXPECT_THAT(connection, IsOk());
    return *std::move(connection);
  }
  // The end may come before all of the opening is written.
  static bool IsRefused(const std::string& address, const std::string& ticket) {
    auto connection = LinkDialer(address, {}).Dial(ticket, absl::Seconds(60), [] { return true; });
    return !connection.ok() || !Next(**connection).has_value();
  }
  struct Frame {
    LinkFrame head;
    std::string payload;
  };
  // The next one; nothing when the coordinator has ended the connection without a word.
  static std::optional<Frame> Next(LinkConnection& connection) {
    const absl::StatusOr<std::optional<LinkFrame>> head = ReadFrameHead(connection);
    if (!head.ok() || !head->has_value()) return std::nullopt;
    Frame frame{**head, std::string((*head)->size, '\0')};
    EXPECT_THAT(ReadPayload(connection, frame.payload.data(), frame.payload.size()), IsOk());
    return frame;
  }
  // What the last frame says.
  static grpc::Status EndOf(const Frame& frame) {
    EXPECT_EQ(frame.head.kind, Kind::kEnd);
    quern::v1::ErrorStatus error;
    EXPECT_TRUE(error.ParseFromString(frame.payload));
    return grpc::Status(static_cast<grpc::StatusCode>(error.code()), error.message(), frame.payload);
  }

  struct Range {
    uint64_t number;
    std::string path;
    uint64_t offset;
    uint64_t size;
  };
  grpc::Status AskForSource(const quern::v1::AttemptId& id, std::string* ticket) {
    grpc::ClientContext context;
    SignIn(context);
    quern::v1::ReadSourceRequest request;
    *request.mutable_attempt() = id;
    quern::v1::ReadSourceResponse response;
    const grpc::Status status = data_->ReadSource(&context, request, &response);
    *ticket = response.ticket();
    return status;
  }
  // One connection: all ranges at once. The bytes of each, as far as they came.
  grpc::Status Read(const quern::v1::AttemptId& id, const std::vector<Range>& ranges, std::vector<std::string>* read) {
    std::string ticket;
    if (const grpc::Status asked = AskForSource(id, &ticket); !asked.ok()) return asked;
    const std::unique_ptr<LinkConnection> connection = Dial(address_, ticket);
    std::string asked;
    for (const Range& range : ranges) {
      AppendFrame({.kind = Kind::kRange, .range = range.number, .offset = range.offset, .length = range.size}, range.path, &asked);
    }
    EXPECT_THAT(connection->Write(asked.data(), asked.size()), IsOk());
    read->assign(ranges.size(), "");
    uint64_t left = 0;
    for (const Range& range : ranges) left += range.size;
    while (left > 0 || ranges[0].size == 0) {
      const std::optional<Frame> frame = Next(*connection);
      if (!frame.has_value()) return grpc::Status(grpc::StatusCode::UNKNOWN, "the connection ended without a word");
      if (frame->head.kind == Kind::kEnd) return EndOf(*frame);
      std::string& bytes = (*read)[frame->head.range];
      EXPECT_EQ(frame->head.kind, Kind::kChunk);
      EXPECT_EQ(frame->head.offset, ranges[frame->head.range].offset + bytes.size());
      EXPECT_EQ(frame->head.xxh3, Xxh3Of(frame->payload.data(), frame->payload.size()));
      bytes += frame->payload;
      left -= frame->payload.size();
    }
    return grpc::Status::OK;
  }
  grpc::Status Check(const DesiredAttempt& attempt, const std::string& path, uint64_t* size) {
    grpc::ClientContext context;
    SignIn(context);
    quern::v1::CheckSourceRequest request;
    *request.mutable_attempt() = attempt.id();
    request.add_paths(path);
    request.set_headers(true);
    quern::v1::CheckSourceResponse response;
    const grpc::Status status = data_->CheckSource(&context, request, &response);
    *size = response.sizes_size() == 1 ? response.sizes(0) : 0;
    return status;
  }

  // An upload, over one connection if the call is answered.
  class Upload {
   public:
    Upload(DataServiceTest* test, const quern::v1::AttemptId& id, uint64_t size, uint64_t durable, uint64_t sync_every = 1) {
      grpc::ClientContext context;
      test->SignIn(context);
      quern::v1::WriteShardRequest request;
      *request.mutable_attempt() = id;
      request.set_size(size);
      request.set_durable(durable);
      request.set_sync_every(sync_every);
      opened_ = test->data_->WriteShard(&context, request, &response_);
      if (opened_.ok()) connection_ = Dial(test->address_, response_.ticket());
    }
    // What the call's answer said.
    uint64_t have() const { return response_.durable(); }
    // The next answer.
    uint64_t Durable() {
      const std::optional<Frame> frame = Next(*connection_);
      EXPECT_TRUE(frame.has_value() && frame->head.kind == Kind::kDurable);
      return frame.has_value() ? frame->head.offset : 0;
    }
    bool Finished() {
      const std::optional<Frame> frame = Next(*connection_);
      return frame.has_value() && frame->head.kind == Kind::kFinished;
    }
    void Send(uint64_t offset, const std::string& data, bool garble = false) {
      std::string frame;
      AppendFrame({.kind = Kind::kChunk, .offset = offset, .xxh3 = Xxh3Of(data.data(), data.size()) + (garble ? 1 : 0)}, data, &frame);
      SendBytes(frame);
    }
    void Finish() {
      std::string frame;
      AppendFrame({.kind = Kind::kFinish}, "", &frame);
      SendBytes(frame);
    }
    // The coordinator may have ended the connection already.
    void SendBytes(const std::string& bytes) { connection_->Write(bytes.data(), bytes.size()).IgnoreError(); }
    grpc::Status End() {
      if (!opened_.ok()) return opened_;
      std::optional<Frame> frame;
      while ((frame = Next(*connection_)).has_value() && frame->head.kind != Kind::kEnd) {
      }
      return frame.has_value() ? EndOf(*frame) : grpc::Status(grpc::StatusCode::UNKNOWN, "the connection ended without a word");
    }

   private:
    grpc::Status opened_;
    quern::v1::WriteShardResponse response_;
    std::unique_ptr<LinkConnection> connection_;
  };

  // What the worker would send, as far as the coordinator looks at it.
  static std::string Shard(const DesiredAttempt& attempt) {
    std::string content = attempt.spec().write_shard().header();
    content.resize(attempt.spec().write_shard().file_size(), 'w');
    return content;
  }
  void SendWhole(const DesiredAttempt& attempt, const std::string& content) {
    Upload upload(this, attempt.id(), content.size(), 0, content.size());
    EXPECT_EQ(upload.have(), 0);
    for (uint64_t at = 0; at < content.size(); at += kLargestChunk) upload.Send(at, content.substr(at, kLargestChunk));
    EXPECT_EQ(upload.Durable(), content.size());
    upload.Finish();
    ASSERT_TRUE(upload.Finished());
    EXPECT_TRUE(upload.End().ok());
  }

  const TempDir directory_ = TempDir::Make("quern-data-test").value();
  std::string source_, output_, address_, token_file_, token_;
  std::unique_ptr<JobStore> store_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<quern::v1::Jobs::Stub> jobs_;
  std::unique_ptr<quern::v1::Workers::Stub> workers_;
  std::unique_ptr<quern::v1::Data::Stub> data_;
};

TEST_F(DataServiceTest, BlindWorkerIsGrantedStreams) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  EXPECT_TRUE(attempt.fetch_source());
  EXPECT_TRUE(attempt.send_output());
}

TEST_F(DataServiceTest, RangesOfPlannedFilesAreServed) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  ASSERT_GT(attempt.spec().source_files_size(), 0);
  const std::string& path = attempt.spec().source_files(0).path();
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(path));
  uint64_t size = 0;
  EXPECT_TRUE(Check(attempt, path, &size).ok());
  EXPECT_EQ(size, content.size());
  std::vector<Range> ranges = {{0, path, 0, content.size()}, {1, "", 100, 7}};
  for (uint64_t i = 2; i < 1500; ++i) ranges.push_back({i, "", i, 3});
  std::vector<std::string> read;
  const grpc::Status status = Read(attempt.id(), ranges, &read);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(read[0], content);
  EXPECT_EQ(read[1], content.substr(100, 7));
  for (uint64_t i = 2; i < 1500; ++i) ASSERT_EQ(read[i], content.substr(i, 3));
  const Server::Figures figures = server_->figures();
  EXPECT_EQ(figures.data_sent, content.size() + 7 + 1498 * 3);
  EXPECT_EQ(figures.data_received, 0u);
  EXPECT_GE(figures.connections, 1);
  EXPECT_GE(figures.accepted, 1u);
}

TEST_F(DataServiceTest, OtherFilesAndOtherRangesAreRefused) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  const std::string& path = attempt.spec().source_files(0).path();
  std::vector<std::string> read;
  for (const std::string& other :
       {JoinPath(source_, "config.json"), std::string("/etc/passwd"), absl::StrCat(source_, "/../src/", BaseName(path))}) {
    const grpc::Status status = Read(attempt.id(), {{0, other, 0, 1}}, &read);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << other;
    EXPECT_EQ(ReasonIn(status), "PATH_NOT_ALLOWED");
    uint64_t size = 0;
    EXPECT_EQ(Check(attempt, other, &size).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  }
  QUERN_ASSERT_OK_AND_ASSIGN(const uint64_t size, FileSize(path));
  EXPECT_EQ(Read(attempt.id(), {{0, path, size, 1}}, &read).error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(Read(attempt.id(), {{0, path, UINT64_MAX, 2}}, &read).error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(Read(attempt.id(), {{0, path, 0, 0}}, &read).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Read(attempt.id(), {{0, "", 0, 1}}, &read).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(DataServiceTest, ChangedSourceIsTold) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  const std::string& path = attempt.spec().source_files(0).path();
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(path));
  // Another file with the same bytes.
  QUERN_ASSERT_OK(WriteFileDurably(path, content));
  std::vector<std::string> read;
  const grpc::Status status = Read(attempt.id(), {{0, path, 0, 1}}, &read);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonIn(status), "SOURCE_CHANGED");
  uint64_t size = 0;
  EXPECT_EQ(ReasonIn(Check(attempt, path, &size)), "SOURCE_CHANGED");
  QUERN_ASSERT_OK(RemoveFile(path));
  EXPECT_EQ(Check(attempt, path, &size).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(DataServiceTest, FencedAttemptsGetNothingAndSendNothing) {
  const Job job = Create();
  const DesiredAttempt attempt = NextGrant();
  const std::string& path = attempt.spec().source_files(0).path();
  const uint64_t size = attempt.spec().write_shard().file_size();
  Upload upload(this, attempt.id(), size, 0);
  EXPECT_EQ(upload.have(), 0);
  upload.Send(0, "abc");
  EXPECT_EQ(upload.Durable(), 3);
  grpc::ClientContext context;
  quern::v1::CancelJobRequest cancel;
  cancel.set_name(job.name());
  Job cancelled;
  ASSERT_TRUE(jobs_->CancelJob(&context, cancel, &cancelled).ok());
  upload.Send(3, "def");
  const grpc::Status ended = upload.End();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonIn(ended), "FENCED");
  EXPECT_EQ(FileSize(attempt.output_path()).value_or(0), 3);
  EXPECT_EQ(ReasonIn(Upload(this, attempt.id(), size, 3).End()), "FENCED");
  std::vector<std::string> read;
  EXPECT_EQ(ReasonIn(Read(attempt.id(), {{0, path, 0, 1}}, &read)), "FENCED");
  quern::v1::AttemptId unknown = attempt.id();
  unknown.set_attempt(77);
  EXPECT_EQ(ReasonIn(Read(unknown, {{0, path, 0, 1}}, &read)), "FENCED");
  unknown.set_job("nonsense");
  EXPECT_EQ(Read(unknown, {{0, path, 0, 1}}, &read).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(DataServiceTest, UploadGoesOnAfterABreakAndTheNewerStreamWins) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  const std::string content = Shard(attempt);
  Upload first(this, attempt.id(), content.size(), 0);
  EXPECT_EQ(first.have(), 0);
  first.Send(0, content.substr(0, 1000));
  EXPECT_EQ(first.Durable(), 1000);
  first.Send(1000, content.substr(1000, 500));
  EXPECT_EQ(first.Durable(), 1500);
  // The answer of the last one may have been lost.
  Upload second(this, attempt.id(), content.size(), 1000);
  EXPECT_EQ(second.have(), 1500);
  first.Send(1500, content.substr(1500, 10));
  EXPECT_EQ(first.End().error_code(), grpc::StatusCode::ABORTED);
  second.Send(1500, content.substr(1500, 10));
  EXPECT_EQ(second.Durable(), 1510);
  second.Send(1500, content.substr(1500, 10));
  EXPECT_EQ(second.End().error_code(), grpc::StatusCode::ABORTED);
  Upload garbled(this, attempt.id(), content.size(), 1510);
  EXPECT_EQ(garbled.have(), 1510);
  garbled.Send(1510, content.substr(1510, 10), /*garble=*/true);
  EXPECT_EQ(garbled.End().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(FileSize(attempt.output_path()).value_or(0), 1510);
}

TEST_F(DataServiceTest, UploadGoesOnAfterARestart) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  const std::string content = Shard(attempt);
  {
    Upload upload(this, attempt.id(), content.size(), 0, 1000);
    EXPECT_EQ(upload.have(), 0);
    upload.Send(0, content.substr(0, 1000));
    EXPECT_EQ(upload.Durable(), 1000);
    upload.Send(1000, content.substr(1000, 600));  // never acknowledged
    while (FileSize(attempt.output_path()).value_or(0) < 1600) {
    }
  }
  Stop();
  Start();
  Upload upload(this, attempt.id(), content.size(), 1000, content.size());
  EXPECT_EQ(upload.have(), 1000) << "what no sender was told of is not trusted";
  for (uint64_t at = 1000; at < content.size(); at += kLargestChunk) upload.Send(at, content.substr(at, kLargestChunk));
  EXPECT_EQ(upload.Durable(), content.size());
  upload.Finish();
  ASSERT_TRUE(upload.Finished());
  EXPECT_THAT(ReadFileToString(attempt.output_path()), IsOkAndHolds(content));
  // The answer was lost: the end is told again.
  Upload again(this, attempt.id(), content.size(), content.size());
  EXPECT_EQ(again.have(), content.size());
  again.Finish();
  ASSERT_TRUE(again.Finished());
  EXPECT_THAT(ReadFileToString(attempt.output_path()), IsOkAndHolds(content));
}

TEST_F(DataServiceTest, LostBytesAreTold) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  EXPECT_EQ(Upload(this, attempt.id(), attempt.spec().write_shard().file_size(), 10).End().error_code(), grpc::StatusCode::DATA_LOSS);
}

TEST_F(DataServiceTest, WrongUploadsAreRefused) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  const uint64_t size = attempt.spec().write_shard().file_size();
  for (const uint64_t other : {uint64_t{0}, uint64_t{4}, size - 1, size + 1, uint64_t{1} << 50, UINT64_MAX}) {
    EXPECT_EQ(Upload(this, attempt.id(), other, 0).End().error_code(), grpc::StatusCode::INVALID_ARGUMENT) << other;
  }
  EXPECT_FALSE(FileExists(attempt.output_path()));
  {
    Upload longer(this, attempt.id(), size, 0, size);
    EXPECT_EQ(longer.have(), 0);
    for (uint64_t at = 0; at <= size; at += kLargestChunk) longer.Send(at, std::string(kLargestChunk, 'x'));
    EXPECT_EQ(longer.End().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  const uint64_t have = FileSize(attempt.output_path()).value_or(0);
  {
    Upload early(this, attempt.id(), size, 0);
    EXPECT_EQ(early.have(), have);
    early.Finish();
    EXPECT_EQ(early.End().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  }
  {
    Upload large(this, attempt.id(), size, 0);
    EXPECT_EQ(large.have(), have);
    large.Send(0, std::string(kLargestChunk + 1, 'x'));
    EXPECT_EQ(large.End().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  for (const Kind kind : {Kind::kRange, Kind::kDurable, Kind::kEnd, static_cast<Kind>(0), static_cast<Kind>(99)}) {
    Upload other(this, attempt.id(), size, 0);
    std::string frame;
    AppendFrame({.kind = kind}, "", &frame);
    other.SendBytes(frame);
    EXPECT_EQ(other.End().error_code(), grpc::StatusCode::INVALID_ARGUMENT) << static_cast<uint32_t>(kind);
  }
}

TEST_F(DataServiceTest, TicketsLetOneConnectionIn) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  const std::string& path = attempt.spec().source_files(0).path();
  std::string ticket;
  ASSERT_TRUE(AskForSource(attempt.id(), &ticket).ok());
  const std::unique_ptr<LinkConnection> first = Dial(address_, ticket);
  std::string range;
  AppendFrame({.kind = Kind::kRange, .length = 8}, path, &range);
  QUERN_ASSERT_OK(first->Write(range.data(), range.size()));
  EXPECT_EQ(Next(*first)->payload.size(), 8);
  EXPECT_TRUE(IsRefused(address_, ticket)) << "it was used";
  EXPECT_TRUE(IsRefused(address_, NewTicket())) << "nobody has it";
  ASSERT_TRUE(AskForSource(attempt.id(), &ticket).ok());
  std::string wrong = ticket;
  wrong[40] = wrong[40] == '0' ? '1' : '0';
  // The right name with another ticket: it is refused, and the right one is good still.
  const UniqueFd fd = ConnectTo(JoinPath(directory_.path(), "s.sock"));
  const std::string opening = Greeting(ticket) + wrong;
  ASSERT_EQ(send(fd.get(), opening.data(), opening.size(), MSG_NOSIGNAL), static_cast<ssize_t>(opening.size()));
  char byte;
  EXPECT_LE(recv(fd.get(), &byte, 1, 0), 0);
  const std::unique_ptr<LinkConnection> second = Dial(address_, ticket);
  QUERN_ASSERT_OK(second->Write(range.data(), range.size()));
  EXPECT_EQ(Next(*second)->payload.size(), 8);
}

TEST_F(DataServiceTest, AttemptIsItsHoldersAlone) {
  const std::string holder(40, 'h'), other(40, 'o');
  token_file_ = JoinPath(directory_.path(), "tokens");
  QUERN_ASSERT_OK(WriteFileDurably(token_file_, absl::StrCat("holder admin ", holder, "\nother admin ", other, "\n")));
  ASSERT_EQ(chmod(token_file_.c_str(), 0600), 0);
  Stop();
  Start();
  token_ = holder;
  Create();
  const DesiredAttempt attempt = NextGrant();
  const std::string& path = attempt.spec().source_files(0).path();
  const uint64_t size = attempt.spec().write_shard().file_size();
  token_ = other;
  std::string ticket;
  EXPECT_EQ(AskForSource(attempt.id(), &ticket).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  uint64_t found = 0;
  EXPECT_EQ(Check(attempt, path, &found).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Upload(this, attempt.id(), size, 0).End().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_FALSE(FileExists(attempt.output_path()));
  token_ = holder;
  EXPECT_TRUE(AskForSource(attempt.id(), &ticket).ok());
  EXPECT_TRUE(Check(attempt, path, &found).ok());
  EXPECT_EQ(Upload(this, attempt.id(), size, 0).have(), 0);
}

TEST_F(DataServiceTest, GreetingMayComeInPieces) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  std::string ticket;
  ASSERT_TRUE(AskForSource(attempt.id(), &ticket).ok());
  LinkConnection connection(ConnectTo(JoinPath(directory_.path(), "s.sock")));
  std::string opening = Greeting(ticket) + ticket;
  AppendFrame({.kind = Kind::kRange, .length = 8}, attempt.spec().source_files(0).path(), &opening);
  for (const char byte : opening) QUERN_ASSERT_OK(connection.Write(&byte, 1));
  EXPECT_EQ(Next(connection)->payload.size(), 8);
}

TEST_F(DataServiceTest, ResultOfAJobIsListedAndRead) {
  const Job job = Create();
  quern::v1::ListResultRequest list_request;
  list_request.set_job(job.name());
  quern::v1::ListResultResponse list;
  {
    grpc::ClientContext context;
    EXPECT_EQ(data_->ListResult(&context, list_request, &list).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  }
  SynchronizeRequest request = Worker();
  for (uint32_t i = 0; i < job.progress().tasks_total(); ++i) {
    const DesiredAttempt attempt = NextGrant(request);
    const std::string content = Shard(attempt);
    SendWhole(attempt, content);
    request = Worker();
    *request.add_attempts() = CompletedWith(attempt, content);
  }
  request.set_slots(0);
  Sync(request);
  Job done;
  while ((done = Get(job.name())).state() == Job::RUNNING || done.state() == Job::PUBLISHING) {
  }
  ASSERT_EQ(done.state(), Job::SUCCEEDED) << done.error().message();

  {
    grpc::ClientContext context;
    const grpc::Status status = data_->ListResult(&context, list_request, &list);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  ASSERT_GT(list.files_size(), 5);
  EXPECT_EQ(list.files(list.files_size() - 1).name(), "model.safetensors.index.json");
  EXPECT_EQ(list.files(list.files_size() - 2).name(), "config.json");
  const auto read = [&](const std::string& name, uint64_t offset, std::string* bytes) {
    grpc::ClientContext context;
    quern::v1::ReadResultRequest read_request;
    read_request.set_job(job.name());
    read_request.set_name(name);
    read_request.set_offset(offset);
    quern::v1::ReadResultResponse response;
    bytes->clear();
    if (const grpc::Status asked = data_->ReadResult(&context, read_request, &response); !asked.ok()) return asked;
    const std::unique_ptr<LinkConnection> connection = Dial(address_, response.ticket());
    std::optional<Frame> frame;
    while ((frame = Next(*connection)).has_value() && frame->head.kind == Kind::kChunk) {
      EXPECT_EQ(frame->head.offset, offset + bytes->size());
      EXPECT_EQ(frame->head.xxh3, Xxh3Of(frame->payload.data(), frame->payload.size()));
      *bytes += frame->payload;
    }
    return frame.has_value() ? EndOf(*frame) : grpc::Status(grpc::StatusCode::UNKNOWN, "the connection ended without a word");
  };
  std::string bytes;
  for (const auto& file : list.files()) {
    const grpc::Status status = read(file.name(), 0, &bytes);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(bytes.size(), file.size()) << file.name();
    EXPECT_EQ(Sha256Of(bytes), file.sha256()) << file.name();
  }
  const auto& first = list.files(0);
  std::string rest;
  EXPECT_TRUE(read(first.name(), 0, &bytes).ok());
  EXPECT_TRUE(read(first.name(), 100, &rest).ok());
  EXPECT_EQ(rest, bytes.substr(100));
  EXPECT_TRUE(read(first.name(), first.size(), &rest).ok());
  EXPECT_EQ(rest, "");
  EXPECT_EQ(read(first.name(), first.size() + 1, &rest).error_code(), grpc::StatusCode::OUT_OF_RANGE);
  for (const char* name : {"../src/config.json", ".quern/run.json", "/etc/passwd", ""}) {
    EXPECT_EQ(read(name, 0, &rest).error_code(), grpc::StatusCode::NOT_FOUND) << name;
  }
}

TEST_F(DataServiceTest, StoppingEndsOpenConnections) {
  Create();
  const DesiredAttempt attempt = NextGrant();
  std::string ticket, unused;
  ASSERT_TRUE(AskForSource(attempt.id(), &ticket).ok());
  ASSERT_TRUE(AskForSource(attempt.id(), &unused).ok());
  const std::unique_ptr<LinkConnection> idle = Dial(address_, ticket);
  std::string range;
  AppendFrame({.kind = Kind::kRange, .length = 8}, attempt.spec().source_files(0).path(), &range);
  QUERN_ASSERT_OK(idle->Write(range.data(), range.size()));
  EXPECT_EQ(Next(*idle)->payload.size(), 8);
  EXPECT_EQ(server_->figures().data_connections, 1);
  Stop();
  EXPECT_FALSE(Next(*idle).has_value());
}

}  // namespace
}  // namespace quern::daemon
