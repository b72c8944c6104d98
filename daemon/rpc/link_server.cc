#include "daemon/rpc/link_server.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/link/frame.h"
#include "base/link/ticket.h"
#include "base/status_macros.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

constexpr int kRefusedConnectionLines = 20;  // a second
// For the peer to take the last bytes, and to close.
constexpr absl::Duration kFarewell = absl::Seconds(5);

}  // namespace

LinkServer::LinkServer(LinkServerOptions options)
    : options_(std::move(options)),
      contexts_(options_.tls, TlsContexts::Side::kServer),
      refused_(options_.log, options_.clock, kRefusedConnectionLines) {}

LinkServer::~LinkServer() { Shutdown(); }

LinkServer::Over::~Over() {
  for (Open& one : connections) one.thread.join();
}

void LinkServer::TakeOver(Over* over) {
  const absl::Duration now = options_.clock->Monotonic();
  for (auto it = tickets_.begin(); it != tickets_.end();) {
    if (it->second.until > now) {
      ++it;
      continue;
    }
    over->tickets.push_back(std::move(it->second));
    it = tickets_.erase(it);
  }
  for (auto it = open_.begin(); it != open_.end();) {
    const auto next = std::next(it);
    if (it->over) over->connections.splice(over->connections.end(), open_, it);
    it = next;
  }
}

bool LinkServer::IsFull(size_t all, size_t own) const {
  return all >= options_.most || own >= std::max<size_t>(1, options_.most - options_.most / 4);
}

size_t LinkServer::OpenOf(const std::string& principal) const {
  return std::count_if(open_.begin(), open_.end(), [&](const Open& one) { return one.principal == principal; });
}

absl::StatusOr<std::string> LinkServer::Admit(const std::string& principal, Serve serve) {
  std::string ticket = NewTicket();
  Over over;
  MutexLock lock(&mutex_);
  if (shut_down_) return absl::UnavailableError("the coordinator is stopping");
  TakeOver(&over);
  const size_t tickets =
      std::count_if(tickets_.begin(), tickets_.end(), [&](const auto& one) { return one.second.principal == principal; });
  if (IsFull(tickets_.size(), tickets) || IsFull(open_.size(), OpenOf(principal))) {
    return absl::ResourceExhaustedError("the coordinator has too many data connections: try again later");
  }
  tickets_[NameOfTicket(ticket)] = {principal, ticket, std::move(serve), options_.clock->Monotonic() + options_.ticket};
  return ticket;
}

LinkServer::Serve LinkServer::Redeem(const std::string& name, const std::string& ticket) {
  Over over;
  MutexLock lock(&mutex_);
  TakeOver(&over);
  const auto found = tickets_.find(name);
  if (found == tickets_.end() || CRYPTO_memcmp(found->second.ticket.data(), ticket.data(), ticket.size()) != 0) return nullptr;
  Serve serve = std::move(found->second.serve);
  tickets_.erase(found);
  return serve;
}

void LinkServer::Refuse(const std::string& peer, absl::string_view reason) {
  refused_.Write(absl::StrCat("audit event=data_connection_refused from=", LogValue(peer), " reason=", LogValue(reason)));
}

void LinkServer::Take(UniqueFd socket, const std::string& name, bool speaks_tls, const std::string& peer) {
  Over over;
  absl::string_view reason;
  {
    MutexLock lock(&mutex_);
    TakeOver(&over);
    const auto ticket = tickets_.find(name);
    if (shut_down_) {
      reason = "the coordinator is stopping";
    } else if (ticket == tickets_.end()) {
      reason = "there is no such ticket";
    } else if (IsFull(open_.size(), OpenOf(ticket->second.principal))) {
      reason = "there are too many data connections";
    } else {
      Open& open = open_.emplace_back();
      open.principal = ticket->second.principal;
      open.connection = std::make_unique<LinkConnection>(std::move(socket), options_.stalled);
      try {
        open.thread = std::thread([this, &open, name, speaks_tls, peer] {
          Run(*open.connection, name, speaks_tls, peer);
          MutexLock done(&mutex_);
          open.over = true;
        });
      } catch (const std::system_error&) {
        open_.pop_back();
        reason = "the system gives no thread for it";
      }
    }
  }
  if (!reason.empty()) Refuse(peer, reason);
}

absl::StatusOr<LinkServer::Serve> LinkServer::LetIn(LinkConnection& connection, const std::string& name, bool speaks_tls) {
  const absl::Duration until = Clock::Real()->Monotonic() + options_.handshake;
  if (speaks_tls) {
    QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<SSL_CTX> context, contexts_.Get());
    QUERN_RETURN_IF_ERROR(connection.BeTlsServer(context.get(), options_.handshake));
  }
  std::string ticket(kTicketSize, '\0');
  QUERN_ASSIGN_OR_RETURN(const bool shown, connection.Read(ticket.data(), ticket.size(), until - Clock::Real()->Monotonic()));
  if (!shown) return absl::UnavailableError("it showed no ticket");
  Serve serve = Redeem(name, ticket);
  if (serve == nullptr) return absl::UnauthenticatedError("the ticket is wrong, or was used");
  return serve;
}

void LinkServer::Run(LinkConnection& connection, const std::string& name, bool speaks_tls, const std::string& peer) {
  absl::StatusOr<Serve> serve = LetIn(connection, name, speaks_tls);
  if (!serve.ok()) {
    Refuse(peer, serve.status().message());
    connection.Shutdown();
    return;
  }
  const absl::Status status = (*serve)(connection);
  // What it holds is given back before the peer hears of the end.
  *serve = nullptr;
  std::string end;
  AppendFrame({.kind = LinkFrame::Kind::kEnd}, ToErrorStatus(status), &end);
  if (connection.Write(end.data(), end.size()).ok()) connection.Finish(kFarewell);
  connection.Shutdown();
}

size_t LinkServer::open_connections() {
  MutexLock lock(&mutex_);
  return std::count_if(open_.begin(), open_.end(), [](const Open& open) { return !open.over; });
}

void LinkServer::Shutdown() {
  std::list<Open> open;
  {
    MutexLock lock(&mutex_);
    shut_down_ = true;
    tickets_.clear();
    // Their threads look for themselves in the list's nodes, which stay where they are.
    open.splice(open.end(), open_);
    for (Open& one : open) one.connection->Shutdown();
  }
  for (Open& one : open) one.thread.join();
}

}  // namespace quern::daemon
