// TLS on the server's side.
#ifndef QUERN_DAEMON_RPC_TLS_CREDENTIALS_H_
#define QUERN_DAEMON_RPC_TLS_CREDENTIALS_H_

#include <memory>
#include <string>

#include "base/secret_file.h"
#include "base/tls_files.h"
#include "daemon/rpc/log_limiter.h"
#include "grpcpp/security/server_credentials.h"

namespace quern::daemon {

// Mutual TLS: a client without a certificate that `files.authority` signed does not get as far as a call. The files are read again when
// they change; connections that are open stay.
std::shared_ptr<grpc::ServerCredentials> NewTlsServerCredentials(const TlsFiles& files);

// Tells the log which certificate is in force, and when new files are of no use. Not thread-safe.
class TlsWatch {
 public:
  TlsWatch(TlsFiles files, LogLine log);
  // To be called now and then. Blocks.
  void Poll();

 private:
  struct Versions {
    FileVersion authority, certificate, key;
    bool operator==(const Versions&) const = default;
  };
  const TlsFiles files_;
  const LogLine log_;
  Versions seen_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_TLS_CREDENTIALS_H_
