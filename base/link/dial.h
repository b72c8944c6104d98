// The client's side of a data connection's beginning (base/link/ticket.h).
#ifndef QUERN_BASE_LINK_DIAL_H_
#define QUERN_BASE_LINK_DIAL_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/link/connection.h"
#include "base/link/tls_context.h"

namespace quern {

// Thread-safe.
class LinkDialer {
 public:
  // To the coordinator at `server`, "unix:/path" or "host:port", the same that gRPC calls. TLS is spoken to the latter when there are files
  // for it.
  LinkDialer(std::string server, TlsFiles tls);

  // Connects and shows `ticket`. UNAVAILABLE when nobody answers within `patience` for each of the host's addresses; CANCELLED soon after
  // `wanted` has said no. Blocks.
  absl::StatusOr<std::unique_ptr<LinkConnection>> Dial(const std::string& ticket, absl::Duration patience,
                                                       const std::function<bool()>& wanted);

 private:
  const std::string server_;
  const bool speaks_tls_;
  TlsContexts contexts_;
};

}  // namespace quern

#endif  // QUERN_BASE_LINK_DIAL_H_
