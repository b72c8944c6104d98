#include "daemon/rpc/tls_credentials.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace quern::daemon {
namespace {

constexpr unsigned kRereadSeconds = 1;

}  // namespace

std::shared_ptr<grpc::ServerCredentials> NewTlsServerCredentials(const TlsFiles& files) {
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(files.key, files.certificate, files.authority, kRereadSeconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

TlsWatch::TlsWatch(TlsFiles files, LogLine log) : files_(std::move(files)), log_(std::move(log)) {}

void TlsWatch::Poll() {
  const Versions now{VersionOf(files_.authority), VersionOf(files_.certificate), VersionOf(files_.key)};
  if (now == seen_) return;
  seen_ = now;
  const absl::StatusOr<TlsIdentity> identity = CheckTlsFiles(files_);
  if (!log_) return;
  if (identity.ok()) {
    log_(absl::StrCat("audit event=certificate name=", LogValue(identity->common_name), " valid_until=", LogValue(identity->valid_until)));
  } else {
    log_(absl::StrCat("audit event=certificate_not_usable reason=", LogValue(identity.status().message())));
  }
}

}  // namespace quern::daemon
