// The two clients of the data plane against a server in the same process whose connections break, and which lies and loses what it had.
#include <atomic>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "worker/pipeline/run_task.h"
#include "worker/transfer/range_client.h"
#include "worker/transfer/shard_client.h"
#include "worker/transfer/test_data_server.h"

namespace quern::worker {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::Ge;
using testing::HasSubstr;
using testing::Le;

std::string RandomBytes(uint64_t size) {
  std::string bytes(size, '\0');
  std::mt19937 random(5);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// The end of one transfer.
class Outcome {
 public:
  std::function<void(absl::Status)> Done() {
    return [this](absl::Status status) { end_.set_value(std::move(status)); };
  }
  absl::Status Wait() { return future_.get(); }
  bool ended() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

 private:
  std::promise<absl::Status> end_;
  std::future<absl::Status> future_ = end_.get_future();
};

class TransferTest : public testing::Test {
 protected:
  void Serve(TestDataServer::Plan plan) {
    server_.reset();
    server_ = std::make_unique<TestDataServer>(socket_, std::move(plan));
  }
  std::shared_ptr<DataLink> Link() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 20);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel("unix:" + socket_, grpc::InsecureChannelCredentials(), arguments);
    return std::make_shared<DataLink>(channel, "unix:" + TestDataServer::DataSocket(socket_), TlsFiles());
  }
  static LinkOptions Fast(absl::Duration give_up = absl::Minutes(5)) {
    return {.first_pause = absl::Milliseconds(5),
            .longest_pause = absl::Milliseconds(20),
            .give_up = give_up,
            .connect = absl::Milliseconds(20)};
  }
  static quern::v1::AttemptId Attempt() {
    quern::v1::AttemptId id;
    id.set_job("jobs/1");
    id.set_attempt(1);
    return id;
  }

  const TempDir dir_ = TempDir::Make("transfer").value();
  const std::string socket_ = JoinPath(dir_.path(), "s");
  std::unique_ptr<TestDataServer> server_;
  std::atomic<bool> stop_{false};
};

TEST_F(TransferTest, ManySmallRangesComeInOrder) {
  const std::string content = RandomBytes(1 * kMiB);
  Serve({.files = {{"/a", content}, {"/b", "other"}}});
  RangeClient client(Link(), Attempt(), &stop_, Fast());
  constexpr int kRanges = 2000;
  std::string read(kRanges * 16, '\0'), other(5, '\0');
  std::vector<Outcome> ends(kRanges + 1);
  for (int i = 0; i < kRanges; ++i) {
    client.Fetch("/a", static_cast<uint64_t>(i) * 500, reinterpret_cast<std::byte*>(read.data() + i * 16), 16, ends[i].Done());
  }
  client.Fetch("/b", 0, reinterpret_cast<std::byte*>(other.data()), 5, ends[kRanges].Done());
  for (Outcome& end : ends) QUERN_ASSERT_OK(end.Wait());
  for (int i = 0; i < kRanges; ++i) ASSERT_EQ(read.substr(i * 16, 16), content.substr(i * 500, 16)) << i;
  EXPECT_EQ(other, "other");
  EXPECT_EQ(server_->counts().ranges, kRanges + 1);
  EXPECT_EQ(server_->counts().calls, 1);
}

TEST_F(TransferTest, BrokenConnectionsGoOnWhereTheyWere) {
  const std::string content = RandomBytes(4 * kMiB);
  Serve({.files = {{"/a", content}}, .break_after = 300 * kKiB});
  RangeClient client(Link(), Attempt(), &stop_, Fast());
  std::string read(content.size(), '\0');
  std::vector<Outcome> ends(2);
  const uint64_t half = content.size() / 2 + 77;
  client.Fetch("/a", 0, reinterpret_cast<std::byte*>(read.data()), half, ends[0].Done());
  client.Fetch("/a", half, reinterpret_cast<std::byte*>(read.data() + half), content.size() - half, ends[1].Done());
  QUERN_ASSERT_OK(ends[0].Wait());
  QUERN_ASSERT_OK(ends[1].Wait());
  EXPECT_EQ(read, content);
  const TestDataServer::Counts counts = server_->counts();
  EXPECT_GE(counts.calls, content.size() / (300 * kKiB));
  // Each break costs the chunk that did not come through.
  EXPECT_LE(counts.bytes, content.size() + counts.calls * 64 * kKiB);
}

TEST_F(TransferTest, GarbledChunksAreAskedForAgain) {
  const std::string content = RandomBytes(1 * kMiB);
  Serve({.files = {{"/a", content}}, .garble = 2});
  RangeClient client(Link(), Attempt(), &stop_, Fast());
  std::string read(content.size(), '\0');
  Outcome end;
  client.Fetch("/a", 0, reinterpret_cast<std::byte*>(read.data()), read.size(), end.Done());
  QUERN_ASSERT_OK(end.Wait());
  EXPECT_EQ(read, content);
  EXPECT_GE(server_->counts().calls, 2);
}

TEST_F(TransferTest, CoordinatorThatIsAwayIsWaitedFor) {
  RangeClient client(Link(), Attempt(), &stop_, Fast());
  std::string read(5, '\0');
  Outcome end;
  client.Fetch("/a", 1, reinterpret_cast<std::byte*>(read.data()), read.size(), end.Done());
  EXPECT_FALSE(end.ended());
  Serve({.files = {{"/a", "123456"}}});
  QUERN_ASSERT_OK(end.Wait());
  EXPECT_EQ(read, "23456");
  EXPECT_THAT(client.Check({"/a"}, true), IsOkAndHolds(ElementsAre(6)));
  EXPECT_THAT(client.Check({"/gone"}, true), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(TransferTest, LinkThatStaysAwayIsLost) {
  const LinkOptions options = Fast(absl::Milliseconds(100));
  RangeClient ranges(Link(), Attempt(), &stop_, options);
  std::byte byte;
  Outcome end;
  ranges.Fetch("/a", 0, &byte, 1, end.Done());
  EXPECT_EQ(FailureOf(end.Wait()).reason(), quern::v1::LINK_LOST);
  // For good.
  Outcome later;
  ranges.Fetch("/a", 0, &byte, 1, later.Done());
  EXPECT_EQ(FailureOf(later.Wait()).reason(), quern::v1::LINK_LOST);
  EXPECT_EQ(FailureOf(ranges.Check({"/a"}, false).status()).reason(), quern::v1::LINK_LOST);

  ShardClient shard(Link(), Attempt(), &stop_, options);
  QUERN_ASSERT_OK(shard.Begin(1, 1));
  Outcome sent;
  shard.Write(&byte, 1, sent.Done());
  EXPECT_EQ(FailureOf(sent.Wait()).reason(), quern::v1::LINK_LOST);
  EXPECT_EQ(FailureOf(shard.Finish()).reason(), quern::v1::LINK_LOST);
}

TEST_F(TransferTest, RefusalsAreNotTriedAgain) {
  struct Case {
    grpc::Status status;
    quern::v1::FailureReason reason;
  };
  for (const Case& one :
       {Case{TestDataServer::WithReason(grpc::StatusCode::FAILED_PRECONDITION, "it was replaced", "SOURCE_CHANGED"),
             quern::v1::SOURCE_CHANGED},
        Case{TestDataServer::WithReason(grpc::StatusCode::FAILED_PRECONDITION, "not wanted", "FENCED"), quern::v1::LINK_LOST},
        Case{grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "write: disk full"), quern::v1::DISK_FULL},
        Case{grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "no"), quern::v1::IO_ERROR}}) {
    Serve({.files = {{"/a", "x"}}, .refuse = one.status});
    RangeClient ranges(Link(), Attempt(), &stop_, Fast());
    std::byte byte;
    Outcome end;
    ranges.Fetch("/a", 0, &byte, 1, end.Done());
    const absl::Status status = end.Wait();
    EXPECT_EQ(FailureOf(status).reason(), one.reason) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("/a"), HasSubstr(one.status.error_message())));
    EXPECT_EQ(FailureOf(ranges.Check({"/a"}, true).status()).reason(), one.reason);
    ShardClient shard(Link(), Attempt(), &stop_, Fast());
    QUERN_ASSERT_OK(shard.Begin(1, 1));
    EXPECT_EQ(FailureOf(shard.Finish()).reason(), one.reason);
    EXPECT_EQ(server_->counts().calls, 2);
  }
}

TEST_F(TransferTest, CancelledTransfersEnd) {
  RangeClient ranges(Link(), Attempt(), &stop_, Fast());
  ShardClient shard(Link(), Attempt(), &stop_, Fast());
  QUERN_ASSERT_OK(shard.Begin(1, 1));
  std::byte byte{};
  Outcome fetched, sent, later;
  ranges.Fetch("/a", 0, &byte, 1, fetched.Done());
  shard.Write(&byte, 1, sent.Done());
  ranges.Cancel();
  shard.Cancel();
  EXPECT_THAT(fetched.Wait(), StatusIs(absl::StatusCode::kCancelled));
  EXPECT_THAT(sent.Wait(), StatusIs(absl::StatusCode::kCancelled));
  ranges.Fetch("/a", 0, &byte, 1, later.Done());
  EXPECT_THAT(later.Wait(), StatusIs(absl::StatusCode::kCancelled));
}

TEST_F(TransferTest, StopEndsWhatBlocks) {
  stop_ = true;
  RangeClient ranges(Link(), Attempt(), &stop_, Fast());
  EXPECT_THAT(ranges.Check({"/a"}, true), StatusIs(absl::StatusCode::kCancelled));
  ShardClient shard(Link(), Attempt(), &stop_, Fast());
  QUERN_ASSERT_OK(shard.Begin(0, 1));
  EXPECT_THAT(shard.Finish(), StatusIs(absl::StatusCode::kCancelled));
}

// Gives all of `content` to the sink in pieces, and waits.
absl::Status Send(ShardClient& shard, const std::string& content, uint64_t piece, std::vector<Outcome>* ends) {
  for (uint64_t at = 0; at < content.size(); at += piece) {
    shard.Write(reinterpret_cast<const std::byte*>(content.data() + at), std::min(piece, content.size() - at), (*ends)[at / piece].Done());
  }
  absl::Status first;
  for (Outcome& end : *ends) first.Update(end.Wait());
  return first.ok() ? shard.Finish() : first;
}

TEST_F(TransferTest, ShardArrives) {
  const std::string content = RandomBytes(3 * kMiB + 5);
  Serve({});
  ShardClient shard(Link(), Attempt(), &stop_, Fast());
  QUERN_ASSERT_OK(shard.Begin(content.size(), 512 * kKiB));
  std::vector<Outcome> ends(13);
  // The last piece is shorter than what is acknowledged by itself.
  for (size_t i = 0; i + 1 < ends.size(); ++i) {
    shard.Write(reinterpret_cast<const std::byte*>(content.data() + i * 256 * kKiB), 256 * kKiB, ends[i].Done());
  }
  for (size_t i = 0; i + 1 < ends.size(); ++i) QUERN_ASSERT_OK(ends[i].Wait());
  shard.Write(reinterpret_cast<const std::byte*>(content.data() + 12 * 256 * kKiB), 5, ends[12].Done());
  QUERN_ASSERT_OK(shard.Finish());
  QUERN_ASSERT_OK(ends[12].Wait());
  EXPECT_EQ(server_->shard(), content);
  EXPECT_TRUE(server_->finished());
  EXPECT_EQ(server_->counts().bytes, content.size());
}

TEST_F(TransferTest, BrokenShardGoesOnWhereItWas) {
  const std::string content = RandomBytes(6 * kMiB);
  Serve({.break_after = 1300 * kKiB});
  ShardClient shard(Link(), Attempt(), &stop_, Fast());
  QUERN_ASSERT_OK(shard.Begin(content.size(), 512 * kKiB));
  std::vector<Outcome> ends(24);
  QUERN_ASSERT_OK(Send(shard, content, 256 * kKiB, &ends));
  EXPECT_EQ(server_->shard(), content);
  EXPECT_THAT(server_->counts().calls, Ge(5));
  EXPECT_EQ(server_->counts().bytes, content.size());
}

TEST_F(TransferTest, BytesAreKeptUntilTheyAreDurable) {
  const std::string content = RandomBytes(1 * kMiB);
  Serve({.acknowledge = false});
  ShardClient shard(Link(), Attempt(), &stop_, Fast());
  QUERN_ASSERT_OK(shard.Begin(content.size(), 512 * kKiB));
  Outcome end;
  shard.Write(reinterpret_cast<const std::byte*>(content.data()), content.size(), end.Done());
  while (server_->counts().bytes < content.size()) std::this_thread::yield();
  EXPECT_FALSE(end.ended());
  QUERN_ASSERT_OK(shard.Finish());
  QUERN_ASSERT_OK(end.Wait());
}

TEST_F(TransferTest, CoordinatorThatLostDurableBytesEndsTheAttempt) {
  const std::string content = RandomBytes(2 * kMiB);
  Serve({.break_after = 1200 * kKiB, .lose = 700 * kKiB});
  ShardClient shard(Link(), Attempt(), &stop_, Fast());
  QUERN_ASSERT_OK(shard.Begin(content.size(), 512 * kKiB));
  std::vector<Outcome> ends(8);
  const absl::Status status = Send(shard, content, 256 * kKiB, &ends);
  EXPECT_EQ(FailureOf(status).reason(), quern::v1::LINK_LOST) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("bytes of the shard"));
}

}  // namespace
}  // namespace quern::worker
