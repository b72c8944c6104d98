// How a client or a worker shows a coordinator who it is, and is sure of whom it speaks to.
#ifndef QUERN_BASE_CHANNEL_CREDENTIALS_H_
#define QUERN_BASE_CHANNEL_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/tls_files.h"

namespace quern {

struct ChannelSecurity {
  TlsFiles tls;            // all or none; not used at unix sockets, which are on this machine
  std::string token_file;  // one token, alone in its file; empty: none is sent
};

// Reads the files and says what is wrong with them, and which are missing for `address`: INVALID_ARGUMENT and the errors of
// base/tls_files.h and base/secret_file.h. A token never leaves this machine without TLS. Blocks.
absl::Status CheckChannelSecurity(const std::string& address, const ChannelSecurity& security);

// For a channel to `address`, after CheckChannelSecurity. New certificates and tokens are taken from their files while the channel lives;
// when those cannot be read, the ones of before are used.
std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const std::string& address, const ChannelSecurity& security);

}  // namespace quern

#endif  // QUERN_BASE_CHANNEL_CREDENTIALS_H_
