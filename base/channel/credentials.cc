#include "base/channel/credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/endpoint.h"
#include "base/mutex.h"
#include "base/secret_file.h"
#include "base/status_macros.h"

namespace quern {
namespace {

// Certificates are renewed days before they end.
constexpr unsigned kRereadSeconds = 10;

// gRPC's own spellings of addresses count as other machines.
Endpoint::Kind KindOf(const std::string& address) {
  const absl::StatusOr<Endpoint> endpoint = ParseEndpoint(address);
  return endpoint.ok() ? endpoint->kind : Endpoint::Kind::kRemote;
}

// Puts the token on every call.
class TokenPlugin : public grpc::MetadataCredentialsPlugin {
 public:
  explicit TokenPlugin(std::string path) : path_(std::move(path)) {}
  bool IsBlocking() const override { return false; }  // a look at a file, and rarely a small read
  grpc::string DebugString() override { return "TokenPlugin"; }

  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<grpc::string, grpc::string>* metadata) override {
    MutexLock lock(&mutex_);
    if (const FileVersion version = VersionOf(path_); version != version_) {
      version_ = version;
      absl::StatusOr<std::string> token = ReadTokenFile(path_);
      if (token.ok()) {
        token_ = *std::move(token);
      } else if (token_.empty()) {
        version_ = {};
        return grpc::Status(grpc::StatusCode::UNAUTHENTICATED, std::string(token.status().message()));
      }
    }
    metadata->emplace("authorization", absl::StrCat("Bearer ", token_));
    return grpc::Status::OK;
  }

 private:
  const std::string path_;
  Mutex mutex_;
  FileVersion version_ QUERN_GUARDED_BY(mutex_);
  std::string token_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace

absl::Status CheckChannelSecurity(const std::string& address, const ChannelSecurity& security) {
  if (!security.token_file.empty()) QUERN_RETURN_IF_ERROR(Annotate(ReadTokenFile(security.token_file).status(), "--token-file"));
  if (security.tls.any() && !security.tls.all()) {
    return absl::InvalidArgumentError(
        "--tls-ca, --tls-cert and --tls-key go together (QUERN_TLS_CA, QUERN_TLS_CERT, QUERN_TLS_KEY): both sides of a connection show "
        "who they are");
  }
  const Endpoint::Kind kind = KindOf(address);
  if (kind == Endpoint::Kind::kUnix) return absl::OkStatus();
  if (security.tls.any()) return CheckTlsFiles(security.tls).status();
  if (kind == Endpoint::Kind::kRemote && !security.token_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(address,
                     " is another machine, and without TLS the token would cross the network in the clear: give --tls-ca, --tls-cert and "
                     "--tls-key (QUERN_TLS_CA, QUERN_TLS_CERT, QUERN_TLS_KEY)"));
  }
  return absl::OkStatus();
}

std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const std::string& address, const ChannelSecurity& security) {
  const Endpoint::Kind kind = KindOf(address);
  std::shared_ptr<grpc::ChannelCredentials> channel;
  if (kind != Endpoint::Kind::kUnix && security.tls.all()) {
    grpc::experimental::TlsChannelCredentialsOptions options;
    options.set_certificate_provider(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        security.tls.key, security.tls.certificate, security.tls.authority, kRereadSeconds));
    options.watch_root_certs();
    options.watch_identity_key_cert_pairs();
    channel = grpc::experimental::TlsCredentials(options);
  } else if (security.token_file.empty()) {
    return grpc::InsecureChannelCredentials();
  } else {
    // These make sure that the other end is on this machine.
    channel = grpc::experimental::LocalCredentials(kind == Endpoint::Kind::kUnix ? UDS : LOCAL_TCP);
  }
  if (security.token_file.empty()) return channel;
  return grpc::CompositeChannelCredentials(
      channel, grpc::experimental::MetadataCredentialsFromPlugin(std::make_unique<TokenPlugin>(security.token_file), GRPC_SECURITY_NONE));
}

}  // namespace quern
