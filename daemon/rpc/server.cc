#include "daemon/rpc/server.h"

#include <errno.h>
#include <netdb.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <chrono>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/data_plane.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server_builder.h"

namespace quern::daemon {
namespace {

// A TaskSpec of 8,192 tensors and the results of as many modules fit with room to spare.
constexpr int kLargestMessage = static_cast<int>(64 * kMiB);
constexpr absl::Duration kShutdownPatience = absl::Seconds(5);
// For the last bytes of answers.
constexpr std::chrono::milliseconds kFlushTime{50};

bool IsUnix(const std::string& address, std::string* path) {
  absl::string_view rest = address;
  if (!absl::ConsumePrefix(&rest, "unix:")) return false;
  absl::ConsumePrefix(&rest, "//");
  *path = std::string(rest);
  return true;
}

// Why nothing can listen there. gRPC does not tell.
absl::Status TryToBind(const std::string& address) {
  const std::string what = "cannot listen on";
  std::string path;
  if (IsUnix(address, &path)) {
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    memcpy(name.sun_path, path.data(), path.size());  // PrepareUnixSocket has checked that it fits
    const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) return ErrnoToStatus(errno, "socket", address);
    if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) return ErrnoToStatus(errno, what, address);
    return RemoveFile(path);
  }
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (absl::StartsWith(host, "[")) host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(absl::StrCat(what, " ", address, ": ", gai_strerror(error)));
  // A name may stand for several addresses, of which one is enough.
  absl::Status status = absl::UnavailableError(absl::StrCat(what, " ", address));
  for (const addrinfo* one = found; one != nullptr && !status.ok(); one = one->ai_next) {
    const UniqueFd fd(socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int yes = 1;
    if (fd && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0 &&
        bind(fd.get(), one->ai_addr, one->ai_addrlen) == 0 && listen(fd.get(), 1) == 0) {
      status = absl::OkStatus();
    } else {
      status = ErrnoToStatus(errno, what, address);
    }
  }
  freeaddrinfo(found);
  return status;
}

// Lives as long as one call of Quern's services.
class CountedCall : public grpc::experimental::Interceptor {
 public:
  explicit CountedCall(CallCounter* counter) : counter_(counter) { counter_->Begin(); }
  ~CountedCall() override { counter_->End(); }
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override { methods->Proceed(); }

 private:
  CallCounter* const counter_;
};

class CountedCalls : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit CountedCalls(CallCounter* counter) : counter_(counter) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    // Health checks may watch for as long as the server lives.
    return absl::StartsWith(info->method(), "/quern.") ? new CountedCall(counter_) : nullptr;
  }

 private:
  CallCounter* const counter_;
};

}  // namespace

void CallCounter::Begin() {
  MutexLock lock(&mutex_);
  ++count_;
}

void CallCounter::End() {
  MutexLock lock(&mutex_);
  if (--count_ == 0) none_.SignalAll();
}

void CallCounter::AwaitNone(absl::Duration patience) {
  const absl::Duration deadline = Clock::Real()->Monotonic() + patience;
  MutexLock lock(&mutex_);
  while (count_ > 0) {
    const absl::Duration left = deadline - Clock::Real()->Monotonic();
    if (left <= absl::ZeroDuration()) return;
    none_.WaitFor(&mutex_, left);
  }
}

absl::Status CheckListenAddress(const std::string& address) {
  std::string path;
  if (IsUnix(address, &path)) {
    if (absl::StartsWith(path, "/")) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("--listen ", address, ": the path of a unix socket must be absolute"));
  }
  const size_t colon = address.rfind(':');
  const std::string host = colon == std::string::npos ? "" : address.substr(0, colon);
  uint32_t port = 0;
  if (colon != std::string::npos && (!absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535)) {
    return absl::InvalidArgumentError(absl::StrCat("--listen ", address, ": the port must be a number up to 65535"));
  }
  if (host == "localhost" || host == "[::1]" ||
      (absl::StartsWith(host, "127.") && host.find_first_not_of("0123456789.") == std::string::npos)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--listen ", address,
                   " is refused: without TLS and tokens, which this version lacks, anybody could give it work. Use unix:/path/to.sock or a "
                   "loopback address such as 127.0.0.1:7450"));
}

absl::Status PrepareUnixSocket(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the path of a unix socket has at most ", sizeof(address.sun_path) - 1, " bytes, ", path, " has ", path.size()));
  }
  struct stat info;
  if (stat(DirName(path).c_str(), &info) != 0) {
    return Annotate(ErrnoToStatus(errno, "stat", DirName(path)), "the directory of the socket must be there before the start");
  }
  if (lstat(path.c_str(), &info) != 0) return errno == ENOENT ? absl::OkStatus() : ErrnoToStatus(errno, "stat", path);
  if (!S_ISSOCK(info.st_mode)) return absl::FailedPreconditionError(absl::StrCat(path, " exists and is no socket"));
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return ErrnoToStatus(errno, "socket", path);
  memcpy(address.sun_path, path.data(), path.size());
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 || errno == EAGAIN) {
    return absl::FailedPreconditionError(absl::StrCat("another coordinator listens on ", path));
  }
  if (errno != ECONNREFUSED) return ErrnoToStatus(errno, "connect", path);
  return RemoveFile(path);
}

Server::Server(Coordinator* coordinator)
    : coordinator_(coordinator), jobs_(coordinator), workers_(coordinator->queue()), data_(coordinator) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(Coordinator* coordinator, const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses) {
    QUERN_RETURN_IF_ERROR(CheckListenAddress(address));
    std::string path;
    if (IsUnix(address, &path)) QUERN_RETURN_IF_ERROR(PrepareUnixSocket(path));
    QUERN_RETURN_IF_ERROR(TryToBind(address));
  }
  std::unique_ptr<Server> server(new Server(coordinator));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kLargestMessage);
  builder.SetMaxSendMessageSize(kLargestMessage);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindow);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kHttp2FrameSize);
  // The data plane's clients ask whether the link still is there, and are asked.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kKeepaliveMs / 2);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 3 * kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 2 * kKeepaliveMs);
  // Two servers on one port would share its connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  std::vector<int> ports(addresses.size(), -1);
  for (size_t i = 0; i < addresses.size(); ++i) builder.AddListeningPort(addresses[i], grpc::InsecureServerCredentials(), &ports[i]);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<CountedCalls>(&server->calls_));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  builder.RegisterService(&server->jobs_);
  builder.RegisterService(&server->workers_);
  builder.RegisterService(&server->data_);
  server->server_ = builder.BuildAndStart();
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (server->server_ == nullptr || ports[i] <= 0) return absl::UnavailableError(absl::StrCat("cannot listen on ", addresses[i]));
    std::string path;
    if (!IsUnix(addresses[i], &path)) {
      server->addresses_.push_back(absl::StrCat(addresses[i].substr(0, addresses[i].rfind(':') + 1), ports[i]));
      continue;
    }
    server->addresses_.push_back(addresses[i]);
    // Whoever may enter its directory decides; the socket itself is for owner and group.
    if (chmod(path.c_str(), 0660) != 0) return ErrnoToStatus(errno, "chmod", path);
    server->sockets_.push_back(path);
  }
  return server;
}

void Server::Shutdown() {
  if (server_ == nullptr) return;
  coordinator_->Shutdown();
  jobs_.Shutdown();
  data_.Shutdown();
  // gRPC itself would wait for clients to close their connections, which one that is idle does not do. What counts is that calls are
  // answered.
  calls_.AwaitNone(kShutdownPatience);
  server_->Shutdown(std::chrono::system_clock::now() + kFlushTime);
  server_->Wait();
  server_.reset();
  // gRPC removes its sockets itself; a file that is left is of no use.
  for (const std::string& path : sockets_) RemoveFile(path).IgnoreError();
}

Server::~Server() { Shutdown(); }

}  // namespace quern::daemon
