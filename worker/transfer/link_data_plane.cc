#include "worker/transfer/link_data_plane.h"

#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>

#include <utility>

#include "base/channel/await_connected.h"
#include "base/mutex.h"
#include "worker/transfer/range_client.h"
#include "worker/transfer/shard_client.h"

namespace quern::worker {
namespace {

// A peer that does not answer a ping so long is taken for gone, and is pinged as often while a call is open.
constexpr int kKeepaliveMs = 10'000;

std::shared_ptr<grpc::Channel> NewChannel(const std::string& server, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A link that was cut without a word is noticed.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return grpc::CreateCustomChannel(server, NewChannelCredentials(server, security), arguments);
}

class LinkDataPlane : public DataPlane {
 public:
  LinkDataPlane(const std::string& server, const ChannelSecurity& security) : server_(server), security_(security) {}

  std::unique_ptr<RangeFetcher> NewFetcher(const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop) override {
    return std::make_unique<RangeClient>(Connect(), attempt, stop);
  }
  std::unique_ptr<OutputSink> NewSink(const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop) override {
    return std::make_unique<ShardClient>(Connect(), attempt, stop);
  }

 private:
  // A channel lives as long as somebody uses it. One that is broken and that nobody polls would be made, and given up, again and again.
  std::shared_ptr<DataLink> Connect() {
    MutexLock lock(&mutex_);
    std::shared_ptr<DataLink> link = kept_.lock();
    if (link == nullptr) {
      // Never given back: when its last user is gone, gRPC ends its threads, and one that is polling makes that take ten seconds.
      grpc_init();
      link = std::make_shared<DataLink>(NewChannel(server_, security_), server_, security_.tls);
      kept_ = link;
    }
    return link;
  }

  const std::string server_;
  const ChannelSecurity security_;
  Mutex mutex_;
  std::weak_ptr<DataLink> kept_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<DataPlane> NewLinkDataPlane(const std::string& server, const ChannelSecurity& security) {
  return std::make_unique<LinkDataPlane>(server, security);
}

}  // namespace quern::worker
