#include "daemon/rpc/server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/channel/deadline.h"
#include "base/endpoint.h"
#include "base/status_macros.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_builder.h"

namespace quern::daemon {
namespace {

// A TaskSpec of 8,192 tensors and the results of as many modules fit with room to spare.
constexpr int kLargestMessage = static_cast<int>(64 * kMiB);
constexpr absl::Duration kFastestPing = absl::Seconds(5);
constexpr absl::Duration kReload = absl::Seconds(1);
constexpr absl::Duration kShutdownPatience = absl::Seconds(5);
// For the last bytes of answers.
constexpr absl::Duration kFlushTime = absl::Milliseconds(50);

int Milliseconds(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

void SetLimits(const ServerLimits& limits, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(kLargestMessage);
  builder.SetMaxSendMessageSize(kLargestMessage);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(kLargestMetadata));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits.calls_per_connection);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(limits.handshake));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Milliseconds(limits.idle));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(limits.ping));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(limits.ping));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, Milliseconds(kFastestPing));
  // gRPC puts a message together before it compares its length with the limit, and the length may be any: what waits to be put together
  // has a limit of its own, of all connections, beyond which it ends the calls that hold the most.
  grpc::ResourceQuota buffers("quernd");
  buffers.Resize(limits.buffers);
  builder.SetResourceQuota(buffers);
  // A few compressed bytes may stand for a thousand times as many, and the limit above is of what came over the wire.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
}

}  // namespace

absl::Status CheckServerOptions(const ServerOptions& options) {
  if (options.tls.any() && !options.tls.all()) {
    return absl::InvalidArgumentError(
        "--tls-cert, --tls-key and --tls-client-ca go together: both sides of a connection show who they are");
  }
  for (const std::string& address : options.addresses) {
    const absl::StatusOr<Endpoint> endpoint = ParseEndpoint(address);
    if (!endpoint.ok()) return Annotate(endpoint.status(), "--listen");
    if (endpoint->kind != Endpoint::Kind::kRemote || (options.tls.all() && !options.token_file.empty())) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--listen ", address, " is refused: other machines could reach it, and ",
        options.tls.all()            ? "it would ask nobody for a token. Give --token-file FILE"
        : options.token_file.empty() ? "it has neither TLS nor tokens. Give --tls-cert, --tls-key, --tls-client-ca and --token-file"
                                     : "tokens would cross the network in the clear. Give --tls-cert, --tls-key and --tls-client-ca",
        ", or listen on unix:/path/to.sock or a loopback address such as 127.0.0.1:7450. docs/operations.md, \"Secure\", has the "
        "commands"));
  }
  return absl::OkStatus();
}

Server::Server(Coordinator* coordinator, const ServerOptions& options)
    : coordinator_(coordinator),
      jobs_(coordinator, options.limits.streams),
      workers_(coordinator->queue(), [this](grpc::ServerContextBase* context) { return guard_->PrincipalOf(context); }),
      links_({.tls = options.tls,
              .handshake = options.limits.handshake,
              .stalled = options.limits.streams.stalled,
              .most = static_cast<size_t>(options.limits.data_connections),
              .clock = options.clock,
              .log = options.log}),
      data_(coordinator, &links_, [this](grpc::ServerContextBase* context) { return guard_->PrincipalOf(context); }),
      acceptor_({.most = options.limits.connections,
                 .most_of_a_peer = options.limits.connections_per_peer,
                 .opening = options.limits.handshake,
                 .clock = options.clock,
                 .log = options.log,
                 .take_data =
                     [this, tls = options.tls.all()](UniqueFd socket, const std::string& ticket_name, const Endpoint& endpoint,
                                                     const std::string& peer) {
                       links_.Take(std::move(socket), ticket_name, tls && endpoint.kind != Endpoint::Kind::kUnix, peer);
                     }}),
      tls_watch_(options.tls, options.log) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(Coordinator* coordinator, const std::vector<std::string>& addresses) {
  ServerOptions options;
  options.addresses = addresses;
  return Start(coordinator, std::move(options));
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(Coordinator* coordinator, ServerOptions options) {
  QUERN_RETURN_IF_ERROR(CheckServerOptions(options));
  if (options.tls.all()) QUERN_RETURN_IF_ERROR(CheckTlsFiles(options.tls).status());
  std::unique_ptr<Server> server(new Server(coordinator, options));
  QUERN_ASSIGN_OR_RETURN(server->guard_, Guard::Open({.token_file = options.token_file,
                                                      .most_calls = options.limits.calls,
                                                      .most_calls_per_caller = options.limits.calls_per_caller,
                                                      .clock = options.clock,
                                                      .log = options.log}));
  Guard* const guard = server->guard_.get();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetLimits(options.limits, builder);
  const auto make_credentials = [guard, &options](const Endpoint& endpoint, std::function<std::string()> origin) {
    std::shared_ptr<grpc::ServerCredentials> credentials = endpoint.kind == Endpoint::Kind::kUnix
                                                               ? grpc::experimental::LocalServerCredentials(UDS)
                                                           : options.tls.all() ? NewTlsServerCredentials(options.tls)
                                                                               : grpc::experimental::LocalServerCredentials(LOCAL_TCP);
    credentials->SetAuthMetadataProcessor(guard->ProcessorFor(std::move(origin)));
    return credentials;
  };
  for (const std::string& address : options.addresses) {
    QUERN_ASSIGN_OR_RETURN(ListeningSocket socket, ListeningSocket::Open(address, options.socket_mode));
    server->addresses_.push_back(socket.address());
    server->acceptor_.Add(std::move(socket), builder, make_credentials);
  }
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(NewCallLog(guard, &server->calls_, options.log));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  builder.RegisterService(&server->jobs_);
  builder.RegisterService(&server->workers_);
  builder.RegisterService(&server->data_);
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) return absl::UnavailableError("gRPC could not start its server");
  QUERN_RETURN_IF_ERROR(server->acceptor_.Start());
  const bool tls = options.tls.all();
  if (tls || !options.token_file.empty()) {
    if (tls) server->tls_watch_.Poll();  // says which certificate it is
    server->reload_ = std::make_unique<Ticker>(kReload, [server = server.get(), tls] {
      server->guard_->Poll();
      if (tls) server->tls_watch_.Poll();
    });
  }
  return server;
}

Server::Figures Server::figures() {
  Figures figures;
  figures.open_calls = guard_->open_calls();
  for (const grpc::StatusCode code : {grpc::StatusCode::UNAUTHENTICATED, grpc::StatusCode::PERMISSION_DENIED,
                                      grpc::StatusCode::UNIMPLEMENTED, grpc::StatusCode::RESOURCE_EXHAUSTED}) {
    figures.refused_calls[absl::StatusCodeToString(static_cast<absl::StatusCode>(code))] = guard_->refused(code);
  }
  figures.connections = acceptor_.OpenConnections();
  figures.accepted = acceptor_.accepted();
  figures.not_accepted = acceptor_.not_accepted();
  figures.data_connections = links_.open_connections();
  figures.data_sent = data_.bytes_sent().value();
  figures.data_received = data_.bytes_received().value();
  figures.synchronize_waiting = workers_.seconds(/*may_wait=*/true).Read();
  figures.synchronize_prompt = workers_.seconds(/*may_wait=*/false).Read();
  return figures;
}

void Server::Shutdown() {
  if (server_ == nullptr) return;
  reload_.reset();
  acceptor_.Stop();
  coordinator_->Shutdown();
  jobs_.Shutdown();
  links_.Shutdown();
  // gRPC itself would wait for clients to close their connections, which one that is idle does not do. What counts is that calls are
  // answered.
  calls_.AwaitNone(kShutdownPatience);
  server_->Shutdown(DeadlineIn(kFlushTime));
  server_->Wait();
  server_.reset();
}

Server::~Server() { Shutdown(); }

}  // namespace quern::daemon
