#include "base/link/connection.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace quern {
namespace {

constexpr int kKeepaliveIdleSeconds = 10;
constexpr int kKeepaliveIntervalSeconds = 5;
constexpr int kKeepaliveProbes = 2;
constexpr size_t kRecordSize = 17 << 10;  // of TLS, at most
constexpr size_t kLargestLowWater = 96 << 10;
constexpr absl::Duration kWantedPoll = absl::Milliseconds(50);

// For TCP; a unix socket takes none of it, and needs none.
void SetOptions(int socket, absl::Duration patience) {
  const auto set = [socket](int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof(value)); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(absl::ToInt64Milliseconds(patience)));
}

absl::Status Broken(absl::string_view what) { return absl::UnavailableError(absl::StrCat("the data connection broke: ", what)); }
absl::Status Ended() { return absl::UnavailableError("the data connection was ended"); }
absl::Status TooLong(absl::Duration patience) {
  return absl::DeadlineExceededError(absl::StrCat("nothing has moved on the data connection for ", absl::FormatDuration(patience)));
}

bool ExpectHost(SSL* tls, const std::string& host) {
  in6_addr address;
  if (inet_pton(AF_INET, host.c_str(), &address) == 1 || inet_pton(AF_INET6, host.c_str(), &address) == 1) {
    return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls), host.c_str()) == 1;
  }
  return SSL_set_tlsext_host_name(tls, host.c_str()) == 1 && SSL_set1_host(tls, host.c_str()) == 1;
}

}  // namespace

LinkConnection::LinkConnection(UniqueFd socket, absl::Duration patience)
    : socket_(std::move(socket)), patience_(patience), tls_socket_(socket_.get()) {
  fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  SetOptions(socket_.get(), patience);
}

LinkConnection::~LinkConnection() = default;

absl::Status LinkConnection::BeTlsClient(SSL_CTX* context, const std::string& host, absl::Duration within,
                                         const std::function<bool()>& wanted) {
  return Handshake(context, within, wanted, [&host](SSL* tls) {
    SSL_set_connect_state(tls);
    return ExpectHost(tls, host);
  });
}

absl::Status LinkConnection::BeTlsServer(SSL_CTX* context, absl::Duration within) {
  return Handshake(
      context, within, [] { return true; },
      [](SSL* tls) {
        SSL_set_accept_state(tls);
        return true;
      });
}

absl::Status LinkConnection::Handshake(SSL_CTX* context, absl::Duration within, const std::function<bool()>& wanted,
                                       const std::function<bool(SSL*)>& prepare) {
  const absl::Duration until = Clock::Real()->Monotonic() + within;
  {
    MutexLock lock(&tls_mutex_);
    tls_.reset(SSL_new(context));
    BIO* const bio = tls_socket_.NewBio();
    if (tls_ == nullptr || bio == nullptr) {
      BIO_free(bio);
      return absl::ResourceExhaustedError("there is no memory for a TLS connection");
    }
    SSL_set_bio(tls_.get(), bio, bio);
    if (!prepare(tls_.get())) return absl::InternalError("TLS does not take the name of the other side");
  }
  is_tls_ = true;
  while (wanted()) {
    Step step;
    {
      MutexLock lock(&tls_mutex_);
      ERR_clear_error();
      const int result = SSL_do_handshake(tls_.get());
      step = TlsStep(result, "the TLS handshake failed");
      if (result == 0 && step.status.ok()) step.status = Ended();
      // Also an alert, that tells the other side why.
      const Step flushed = FlushTls();
      if (step.status.ok() && (!flushed.status.ok() || flushed.want != Want::kNothing)) step = flushed;
      if (step.status.ok() && step.want == Want::kNothing) return absl::OkStatus();
      const long verified = SSL_get_verify_result(tls_.get());
      if (!step.status.ok() && verified != X509_V_OK) {
        return absl::UnavailableError(
            absl::StrCat("the certificate of the other side is refused: ", X509_verify_cert_error_string(verified)));
      }
    }
    QUERN_RETURN_IF_ERROR(step.status);
    const absl::Duration left = until - Clock::Real()->Monotonic();
    if (left <= absl::ZeroDuration()) return TooLong(within);
    QUERN_RETURN_IF_ERROR(WaitFor(step.want, std::min(left, kWantedPoll)).status());
  }
  return absl::CancelledError("the connection is not wanted any more");
}

LinkConnection::Step LinkConnection::TlsStep(int result, const char* what) {
  if (result > 0) return {.moved = static_cast<size_t>(result), .want = Want::kNothing, .status = {}};
  const int error = errno;
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return {.moved = 0, .want = Want::kRead, .status = {}};
    case SSL_ERROR_WANT_WRITE:
      return {.moved = 0, .want = Want::kWrite, .status = {}};
    case SSL_ERROR_ZERO_RETURN:
      return {};
    case SSL_ERROR_SYSCALL:
      return {.moved = 0, .want = Want::kNothing, .status = error == 0 ? Ended() : Broken(strerror(error))};
    default: {
      std::array<char, 256> text{};
      ERR_error_string_n(ERR_peek_error(), text.data(), text.size());
      const bool ended = ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
      ERR_clear_error();
      return {.moved = 0, .want = Want::kNothing, .status = ended ? Ended() : Broken(absl::StrCat(what, ": ", text.data()))};
    }
  }
}

LinkConnection::Step LinkConnection::FlushTls() {
  if (const int error = tls_socket_.Flush(); error != 0) return {.moved = 0, .want = Want::kNothing, .status = Broken(strerror(error))};
  return {.moved = 0, .want = tls_socket_.has_output() ? Want::kWrite : Want::kNothing, .status = {}};
}

LinkConnection::Step LinkConnection::TryRead(void* data, size_t size) {
  if (is_tls_) {
    MutexLock lock(&tls_mutex_);
    ERR_clear_error();
    return TlsStep(SSL_read(tls_.get(), data, static_cast<int>(std::min<size_t>(size, INT32_MAX))), "what came is not TLS");
  }
  const ssize_t n = recv(socket_.get(), data, size, 0);
  if (n >= 0) return {.moved = static_cast<size_t>(n), .want = Want::kNothing, .status = {}};
  if (errno == EAGAIN || errno == EINTR) return {.moved = 0, .want = Want::kRead, .status = {}};
  return {.moved = 0, .want = Want::kNothing, .status = Broken(strerror(errno))};
}

LinkConnection::Step LinkConnection::TryWrite(const void* data, size_t size) {
  if (is_tls_) {
    MutexLock lock(&tls_mutex_);
    ERR_clear_error();
    return TlsStep(SSL_write(tls_.get(), data, static_cast<int>(std::min<size_t>(size, INT32_MAX))), "TLS cannot be written");
  }
  const ssize_t n = send(socket_.get(), data, size, MSG_NOSIGNAL);
  if (n >= 0) return {.moved = static_cast<size_t>(n), .want = Want::kNothing, .status = {}};
  if (errno == EAGAIN || errno == EINTR) return {.moved = 0, .want = Want::kWrite, .status = {}};
  return {.moved = 0, .want = Want::kNothing, .status = Broken(strerror(errno))};
}

absl::StatusOr<bool> LinkConnection::WaitFor(Want want, absl::Duration within) {
  pollfd waiting = {.fd = socket_.get(), .events = static_cast<short>(want == Want::kWrite ? POLLOUT : POLLIN), .revents = 0};
  const absl::Duration until = Clock::Real()->Monotonic() + within;
  while (true) {
    const absl::Duration left = std::max(until - Clock::Real()->Monotonic(), absl::ZeroDuration());
    const int64_t milliseconds = std::min<int64_t>(absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))), INT32_MAX);
    const int ready = poll(&waiting, 1, static_cast<int>(milliseconds));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return Broken(strerror(errno));
    if (ready == 0 && milliseconds < INT32_MAX) return false;
  }
}

void LinkConnection::SetLowWater(size_t bytes) {
  if (bytes == low_water_) return;
  low_water_ = bytes;
  const int value = static_cast<int>(bytes);
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &value, sizeof(value));  // a hint
}

absl::Status LinkConnection::Write(const void* data, size_t size) {
  if (cut_) return Ended();
  cut_ = true;  // until all of it is written
  const char* at = static_cast<const char*>(data);
  while (true) {
    const Step step = size > 0 ? TryWrite(at, size) : FlushWritten();
    QUERN_RETURN_IF_ERROR(step.status);
    if (size == 0 && step.want == Want::kNothing) {
      cut_ = false;
      return absl::OkStatus();
    }
    at += step.moved;
    size -= step.moved;
    if (step.moved > 0) continue;
    if (step.want == Want::kNothing) return Ended();
    QUERN_ASSIGN_OR_RETURN(const bool ready, WaitFor(step.want, patience_));
    if (!ready) return TooLong(patience_);
  }
}

LinkConnection::Step LinkConnection::FlushWritten() {
  if (!is_tls_) return {};
  MutexLock lock(&tls_mutex_);
  return FlushTls();
}

absl::StatusOr<bool> LinkConnection::Read(void* data, size_t size, absl::Duration within) {
  const absl::Duration until = within == absl::InfiniteDuration() ? within : Clock::Real()->Monotonic() + within;
  for (size_t have = 0; have < size;) {
    const Step step = TryRead(static_cast<char*>(data) + have, size - have);
    QUERN_RETURN_IF_ERROR(step.status);
    have += step.moved;
    if (step.moved > 0) continue;
    if (step.want == Want::kNothing) {
      if (have == 0) return false;
      return Ended();
    }
    // TLS may hold up to a record of it already.
    const size_t left = size - have;
    SetLowWater(left > 2 * kRecordSize ? std::min(left - kRecordSize, kLargestLowWater) : 1);
    const absl::Duration patience = std::min(patience_, until - Clock::Real()->Monotonic());
    if (patience <= absl::ZeroDuration()) return TooLong(within);
    QUERN_ASSIGN_OR_RETURN(bool ready, WaitFor(step.want, patience));
    if (!ready && low_water_ > 1) {
      // Something may have come, though not as much.
      SetLowWater(1);
      QUERN_ASSIGN_OR_RETURN(ready, WaitFor(step.want, absl::ZeroDuration()));
    }
    if (!ready) return TooLong(patience);
  }
  return true;
}

absl::StatusOr<bool> LinkConnection::Await(absl::Duration within) {
  if (is_tls_) {
    MutexLock lock(&tls_mutex_);
    if (tls_socket_.has_input() || SSL_has_pending(tls_.get()) == 1) return true;
  }
  SetLowWater(1);
  return WaitFor(Want::kRead, within);
}

void LinkConnection::Shutdown() { shutdown(socket_.get(), SHUT_RDWR); }

void LinkConnection::Finish(absl::Duration within) {
  if (is_tls_) {
    MutexLock lock(&tls_mutex_);
    ERR_clear_error();
    // The peer may be gone.
    SSL_shutdown(tls_.get());
    tls_socket_.Flush();
    ERR_clear_error();
  }
  if (shutdown(socket_.get(), SHUT_WR) != 0) return;
  const absl::Duration until = Clock::Real()->Monotonic() + within;
  std::array<char, 16 << 10> thrown_away;
  while (Clock::Real()->Monotonic() < until) {
    const ssize_t n = recv(socket_.get(), thrown_away.data(), thrown_away.size(), 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return;
    if (n < 0 && !WaitFor(Want::kRead, until - Clock::Real()->Monotonic()).value_or(false)) return;
  }
}

}  // namespace quern
