#include "worker/transfer/grpc_data_plane.h"

#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>

#include <utility>

#include "base/channel/await_connected.h"
#include "base/data_plane.h"
#include "base/mutex.h"
#include "worker/transfer/range_client.h"
#include "worker/transfer/shard_client.h"

namespace quern::worker {
namespace {

std::shared_ptr<grpc::Channel> NewChannel(const std::string& server, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(4 * kLargestChunk));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindow);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kHttp2FrameSize);
  // A link that was cut without a word is noticed.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return grpc::CreateCustomChannel(server, NewChannelCredentials(server, security), arguments);
}

class GrpcDataPlane : public DataPlane {
 public:
  GrpcDataPlane(const std::string& server, const ChannelSecurity& security) : server_(server), security_(security) {}

  std::unique_ptr<RangeFetcher> NewFetcher(const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop) override {
    return std::make_unique<RangeClient>(Connect(&sources_), attempt, stop);
  }
  std::unique_ptr<OutputSink> NewSink(const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop) override {
    return std::make_unique<ShardClient>(Connect(&shards_), attempt, stop);
  }

 private:
  // A connection lives as long as somebody uses it. One that is broken and that nobody polls would be made, and given up, again and again.
  std::shared_ptr<DataLink> Connect(std::weak_ptr<DataLink>* kept) {
    MutexLock lock(&mutex_);
    std::shared_ptr<DataLink> link = kept->lock();
    if (link == nullptr) {
      // Never given back: when its last user is gone, gRPC ends its threads, and one that is polling makes that take ten seconds.
      grpc_init();
      const std::shared_ptr<grpc::Channel> channel = NewChannel(server_, security_);
      link = std::make_shared<DataLink>(DataLink{channel, quern::v1::Data::NewStub(channel)});
      *kept = link;
    }
    return link;
  }

  const std::string server_;
  const ChannelSecurity security_;
  Mutex mutex_;
  std::weak_ptr<DataLink> sources_ QUERN_GUARDED_BY(mutex_);
  std::weak_ptr<DataLink> shards_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<DataPlane> NewGrpcDataPlane(const std::string& server, const ChannelSecurity& security) {
  return std::make_unique<GrpcDataPlane>(server, security);
}

}  // namespace quern::worker
