// Addresses of a coordinator, as they are written on command lines.
#ifndef QUERN_BASE_ENDPOINT_H_
#define QUERN_BASE_ENDPOINT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern {

struct Endpoint {
  enum class Kind {
    kUnix,      // unix:/path, reached by who may enter its directory
    kLoopback,  // localhost, 127.x.y.z, [::1]: reached by everybody on this machine
    kRemote,    // any other host
  };
  Kind kind = Kind::kRemote;
  std::string path;  // of a unix socket
  std::string host;  // without brackets; empty: every interface
  uint16_t port = 0;
};

// INVALID_ARGUMENT for what is neither unix:/absolute/path nor host:port, a host being a name, an address, an IPv6 address in brackets, or
// empty.
absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text);

// Likewise for an address to connect to: it needs a host, and a port above 0.
absl::StatusOr<Endpoint> ParseServerAddress(absl::string_view text);

}  // namespace quern

#endif  // QUERN_BASE_ENDPOINT_H_
