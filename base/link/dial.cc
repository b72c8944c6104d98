#include "base/link/dial.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/endpoint.h"
#include "base/link/ticket.h"
#include "base/status_macros.h"

namespace quern {
namespace {

constexpr absl::Duration kDialPoll = absl::Milliseconds(50);

absl::StatusOr<UniqueFd> Connect(const sockaddr* address, socklen_t size, const std::string& server, absl::Duration patience,
                                 const std::function<bool()>& wanted) {
  UniqueFd fd(socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return ErrnoToStatus(errno, "socket", server);
  if (connect(fd.get(), address, size) == 0) return fd;
  if (errno != EINPROGRESS) return absl::UnavailableError(absl::StrCat("connect ", server, ": ", strerror(errno)));
  const absl::Duration until = Clock::Real()->Monotonic() + patience;
  pollfd waiting = {.fd = fd.get(), .events = POLLOUT, .revents = 0};
  while (poll(&waiting, 1, static_cast<int>(absl::ToInt64Milliseconds(kDialPoll))) <= 0) {
    if (!wanted()) return absl::CancelledError("the connection is not wanted any more");
    if (Clock::Real()->Monotonic() >= until) {
      return absl::UnavailableError(absl::StrCat("connect ", server, ": no answer within ", absl::FormatDuration(patience)));
    }
  }
  int error = 0;
  socklen_t error_size = sizeof(error);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &error_size) != 0) error = errno;
  if (error != 0) return absl::UnavailableError(absl::StrCat("connect ", server, ": ", strerror(error)));
  return fd;
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, const std::string& server, absl::Duration patience,
                                     const std::function<bool()>& wanted) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return absl::InvalidArgumentError(absl::StrCat(server, ": the path is too long"));
  memcpy(address.sun_path, path.data(), path.size());
  return Connect(reinterpret_cast<const sockaddr*>(&address), sizeof(address), server, patience, wanted);
}

absl::StatusOr<UniqueFd> ConnectTcp(const Endpoint& endpoint, const std::string& server, absl::Duration patience,
                                    const std::function<bool()>& wanted) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(endpoint.host.c_str(), absl::StrCat(endpoint.port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(absl::StrCat("connect ", server, ": ", gai_strerror(error)));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  absl::Status first;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    absl::StatusOr<UniqueFd> fd = Connect(one->ai_addr, one->ai_addrlen, server, patience, wanted);
    if (fd.ok() || absl::IsCancelled(fd.status())) return fd;
    first.Update(fd.status());
  }
  return first;
}

}  // namespace

LinkDialer::LinkDialer(std::string server, TlsFiles tls)
    : server_(std::move(server)), speaks_tls_(tls.all()), contexts_(std::move(tls), TlsContexts::Side::kClient) {}

absl::StatusOr<std::unique_ptr<LinkConnection>> LinkDialer::Dial(const std::string& ticket, absl::Duration patience,
                                                                 const std::function<bool()>& wanted) {
  QUERN_ASSIGN_OR_RETURN(const Endpoint endpoint, ParseServerAddress(server_));
  const bool unix_socket = endpoint.kind == Endpoint::Kind::kUnix;
  QUERN_ASSIGN_OR_RETURN(
      UniqueFd fd, unix_socket ? ConnectUnix(endpoint.path, server_, patience, wanted) : ConnectTcp(endpoint, server_, patience, wanted));
  auto connection = std::make_unique<LinkConnection>(std::move(fd));
  const std::string greeting = Greeting(ticket);
  QUERN_RETURN_IF_ERROR(connection->Write(greeting.data(), greeting.size()));
  if (!unix_socket && speaks_tls_) {
    const absl::StatusOr<std::shared_ptr<SSL_CTX>> context = contexts_.Get();
    // They may be in the midst of their renewal.
    if (!context.ok()) return absl::UnavailableError(context.status().message());
    QUERN_RETURN_IF_ERROR(connection->BeTlsClient(context->get(), endpoint.host, patience, wanted));
  }
  QUERN_RETURN_IF_ERROR(connection->Write(ticket.data(), ticket.size()));
  return connection;
}

}  // namespace quern
