#include "daemon/rpc/listener.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/link/ticket.h"
#include "base/status_macros.h"

namespace quern::daemon {
namespace {

constexpr int kBacklog = 4096;
constexpr int kMostAtOnce = 64;
constexpr int kLinesPerSecond = 20;
// Users of a unix socket that are told apart; those that come later share the last door.
constexpr int kDoors = 16;
// Descriptors for everything but connections.
constexpr int kOwnFiles = 4096;
constexpr int kPauseMilliseconds = 100;
constexpr int kSilentCheckMilliseconds = 500;

absl::Status FillAddress(const std::string& path, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  if (path.size() >= sizeof(address->sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the path of a unix socket has at most ", sizeof(address->sun_path) - 1, " bytes, ", path, " has ", path.size()));
  }
  memcpy(address->sun_path, path.data(), path.size());
  return absl::OkStatus();
}

int PortOf(const sockaddr_storage& address) {
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string PeerOf(int connection) {
  sockaddr_storage address;
  socklen_t size = sizeof(address);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  if (getpeername(connection, reinterpret_cast<sockaddr*>(&address), &size) != 0 || address.ss_family == AF_UNIX ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) !=
          0) {
    return "unix";
  }
  return address.ss_family == AF_INET6 ? absl::StrCat("ipv6:[", host, "]:", port) : absl::StrCat("ipv4:", host, ":", port);
}

}  // namespace

absl::Status PrepareUnixSocket(const std::string& path) {
  sockaddr_un address;
  QUERN_RETURN_IF_ERROR(FillAddress(path, &address));
  struct stat info;
  if (stat(DirName(path).c_str(), &info) != 0) {
    return Annotate(ErrnoToStatus(errno, "stat", DirName(path)), "the directory of the socket must be there before the start");
  }
  if (lstat(path.c_str(), &info) != 0) return errno == ENOENT ? absl::OkStatus() : ErrnoToStatus(errno, "stat", path);
  if (!S_ISSOCK(info.st_mode)) return absl::FailedPreconditionError(absl::StrCat(path, " exists and is no socket"));
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return ErrnoToStatus(errno, "socket", path);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 || errno == EAGAIN) {
    return absl::FailedPreconditionError(absl::StrCat("another coordinator listens on ", path));
  }
  if (errno != ECONNREFUSED) return ErrnoToStatus(errno, "connect", path);
  return RemoveFile(path);
}

absl::StatusOr<ListeningSocket> ListeningSocket::Open(const std::string& address, mode_t mode) {
  ListeningSocket opened;
  QUERN_ASSIGN_OR_RETURN(opened.endpoint_, ParseEndpoint(address));
  opened.address_ = address;
  QUERN_RETURN_IF_ERROR(opened.endpoint_.kind == Endpoint::Kind::kUnix ? opened.OpenUnix(mode) : opened.OpenTcp(address));
  return opened;
}

ListeningSocket::~ListeningSocket() {
  // A file that is left is of no use to anybody.
  if (endpoint_.kind == Endpoint::Kind::kUnix && !fds_.empty()) RemoveFile(endpoint_.path).IgnoreError();
}

absl::Status ListeningSocket::OpenUnix(mode_t mode) {
  const std::string& path = endpoint_.path;
  QUERN_RETURN_IF_ERROR(PrepareUnixSocket(path));
  sockaddr_un name;
  QUERN_RETURN_IF_ERROR(FillAddress(path, &name));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return ErrnoToStatus(errno, "socket", address_);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0)
    return ErrnoToStatus(errno, "cannot listen on", address_);
  fds_.push_back(std::move(fd));
  // Before anybody can connect.
  if (chmod(path.c_str(), mode) != 0) return ErrnoToStatus(errno, "chmod", path);
  if (listen(fds_.back().get(), kBacklog) != 0) return ErrnoToStatus(errno, "cannot listen on", address_);
  return absl::OkStatus();
}

absl::Status ListeningSocket::OpenTcp(const std::string& text) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = absl::StrCat(endpoint_.port);
  const int error = getaddrinfo(endpoint_.host.empty() ? nullptr : endpoint_.host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(absl::StrCat("cannot listen on ", text, ": ", gai_strerror(error)));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  // A name may stand for several addresses, of which one is enough.
  absl::Status status = absl::UnavailableError(absl::StrCat("cannot listen on ", text));
  int chosen = endpoint_.port;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    sockaddr_storage address = {};
    memcpy(&address, one->ai_addr, std::min<size_t>(one->ai_addrlen, sizeof(address)));
    (one->ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port : reinterpret_cast<sockaddr_in&>(address).sin_port) =
        htons(static_cast<uint16_t>(chosen));
    UniqueFd fd(socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int yes = 1, no = 0;
    if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
        setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)) != 0 ||  // what it accepts has it too
        (one->ai_family == AF_INET6 && endpoint_.host == "::" && setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no)) != 0) ||
        bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), one->ai_addrlen) != 0 || listen(fd.get(), kBacklog) != 0) {
      if (fds_.empty()) status = ErrnoToStatus(errno, "cannot listen on", text);
      continue;
    }
    socklen_t size = sizeof(address);
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return ErrnoToStatus(errno, "getsockname", text);
    chosen = PortOf(address);
    status = absl::OkStatus();
    fds_.push_back(std::move(fd));
  }
  address_ = absl::StrCat(text.substr(0, text.rfind(':') + 1), chosen);
  return status;
}

Acceptor::Acceptor(Options options)
    : options_(std::move(options)),
      log_(options_.log, options_.clock, kLinesPerSecond),
      refused_(options_.log, options_.clock, kLinesPerSecond) {
  rlimit files = {};
  const int limit = getrlimit(RLIMIT_NOFILE, &files) == 0 ? static_cast<int>(std::min<rlim_t>(files.rlim_cur, 1 << 20)) : 1024;
  first_ = std::min(kOwnFiles, limit / 2);
  most_ = std::min(options_.most, limit - first_);
  peers_ = std::make_unique<ConnectionCounts>(options_.most_of_a_peer > 0 ? options_.most_of_a_peer : std::max(1, most_ - most_ / 4),
                                              options_.clock, [](int connection) { return fcntl(connection, F_GETFD) >= 0; });
}

Acceptor::~Acceptor() { Stop(); }

void Acceptor::Add(ListeningSocket socket, grpc::ServerBuilder& builder, const MakeCredentials& make_credentials) {
  using Way = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
  const Endpoint endpoint = socket.endpoint();
  Port port{std::move(socket), {}};
  const int doors = endpoint.kind == Endpoint::Kind::kUnix ? kDoors : 1;
  for (int i = 0; i < doors; ++i) {
    Door door;
    door.user = std::make_shared<std::atomic<int64_t>>(-1);
    const bool last = doors > 1 && i == doors - 1;
    const auto origin = [user = door.user, kind = endpoint.kind, last]() -> std::string {
      if (kind == Endpoint::Kind::kLoopback) return "loopback";
      if (kind == Endpoint::Kind::kRemote) return "remote";
      return last ? "uid:other" : absl::StrCat("uid:", user->load());
    };
    door.way = builder.experimental().AddExternalConnectionAcceptor(Way::FROM_FD, make_credentials(endpoint, origin));
    port.doors.push_back(std::move(door));
  }
  ports_.push_back(std::move(port));
}

absl::Status Acceptor::Start() {
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) return ErrnoToStatus(errno, "eventfd", "of the listeners");
  events_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!events_) return ErrnoToStatus(errno, "epoll_create", "of the listeners");
  std::vector<int> watched = {wake_.get()};
  for (const Port& port : ports_) {
    for (const UniqueFd& fd : port.socket.fds()) watched.push_back(fd.get());
  }
  for (const int fd : watched) {
    epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return ErrnoToStatus(errno, "epoll_ctl", "of the listeners");
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    if (write(wake_.get(), &one, sizeof(one)) != sizeof(one)) return;  // cannot be: the counter was 0
    thread_.join();
  }
  silent_.clear();
  ports_.clear();
}

void Acceptor::Run() {
  std::map<int, Port*> owners;
  for (Port& port : ports_) {
    for (const UniqueFd& fd : port.socket.fds()) owners[fd.get()] = &port;
  }
  std::array<epoll_event, kMostAtOnce> ready;
  while (true) {
    const int count = epoll_wait(events_.get(), ready.data(), ready.size(), silent_.empty() ? -1 : kSilentCheckMilliseconds);
    bool pause = false;
    for (int i = 0; i < count; ++i) {
      const int fd = ready[i].data.fd;
      if (fd == wake_.get()) return;
      const auto listener = owners.find(fd);
      if (listener == owners.end()) {
        Judge(fd);
      } else if (!AcceptFrom(*listener->second, fd)) {
        pause = true;
      }
    }
    CloseSilent();
    // Without descriptors there is nothing to do but to wait for some to be closed.
    if (pause) {
      pollfd stop = {.fd = wake_.get(), .events = POLLIN, .revents = 0};
      if (poll(&stop, 1, kPauseMilliseconds) > 0) return;
    }
  }
}

void Acceptor::CloseSilent() {
  const absl::Duration now = options_.clock->Monotonic();
  if (silent_.empty() || now < next_check_) return;
  next_check_ = now + absl::Milliseconds(kSilentCheckMilliseconds);
  std::erase_if(silent_, [now](const auto& entry) { return entry.second.until <= now; });
}

bool Acceptor::AcceptFrom(Port& port, int listener) {
  for (int i = 0; i < kMostAtOnce; ++i) {
    UniqueFd accepted(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!accepted) {
      if (errno == EAGAIN) return true;
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) continue;  // that connection is gone already
      not_accepted_.Add();
      refused_.Write(
          absl::StrCat("audit event=not_accepted listener=", LogValue(port.socket.address()), " reason=", LogValue(strerror(errno))));
      return false;
    }
    const std::string peer = PeerOfConnection(accepted.get());
    if (!peers_->Admits(peer)) {
      not_accepted_.Add();
      refused_.Write(absl::StrCat("audit event=not_accepted listener=", LogValue(port.socket.address()),
                                  " from=", LogValue(PeerOf(accepted.get())),
                                  " reason=", LogValue(absl::StrCat("there are ", peers_->most(), " connections of ", peer))));
      continue;
    }
    UniqueFd connection(fcntl(accepted.get(), F_DUPFD_CLOEXEC, first_));
    if (!connection || connection.get() >= first_ + most_) {
      not_accepted_.Add();
      refused_.Write(absl::StrCat("audit event=not_accepted listener=", LogValue(port.socket.address()),
                                  " from=", LogValue(PeerOf(accepted.get())),
                                  " reason=", LogValue(absl::StrCat("there are ", most_, " connections"))));
      continue;
    }
    accepted.Reset();
    peers_->Add(peer, connection.get());
    accepted_.Add();
    if (port.socket.endpoint().kind == Endpoint::Kind::kRemote) {
      log_.Write(
          absl::StrCat("audit event=connection listener=", LogValue(port.socket.address()), " from=", LogValue(PeerOf(connection.get()))));
    }
    const int fd = connection.get();
    // An edge is told again when more has come. One that is there already is told at once.
    epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data = {.fd = fd}};
    if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) != 0) continue;
    silent_[fd] = {&port, listener, options_.clock->Monotonic() + options_.opening, std::move(connection)};
  }
  return true;
}

void Acceptor::Judge(int connection) {
  const auto found = silent_.find(connection);
  if (found == silent_.end()) return;
  std::array<char, kGreetingSize> bytes;
  const ssize_t n = recv(connection, bytes.data(), bytes.size(), MSG_PEEK);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  const Opening opening = n <= 0 ? Opening::kOther : JudgeOpening(absl::string_view(bytes.data(), n));
  if (opening == Opening::kTooShort) return;
  Silent silent = std::move(found->second);
  silent_.erase(found);
  // It would be told of for as long as the descriptor is open, whoever has it.
  if (n <= 0 || epoll_ctl(events_.get(), EPOLL_CTL_DEL, connection, nullptr) != 0) return;
  if (opening == Opening::kGreeting) {
    if (recv(connection, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return;
    const std::string peer = PeerOf(connection);
    options_.take_data(std::move(silent.socket), std::string(TicketNameIn(absl::string_view(bytes.data(), bytes.size()))),
                       silent.port->socket.endpoint(), peer);
    return;
  }
  Door& door = DoorFor(*silent.port, connection);
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
  parameters.listener_fd = silent.listener;
  parameters.fd = silent.socket.release();
  door.way->HandleNewConnection(&parameters);
}

int Acceptor::OpenConnections() const {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory("/proc/self/fd");
  if (!names.ok()) return 0;
  return static_cast<int>(std::count_if(names->begin(), names->end(), [this](const std::string& name) {
    int fd = -1;
    return absl::SimpleAtoi(name, &fd) && fd >= first_ && fd < first_ + most_;
  }));
}

Acceptor::Door& Acceptor::DoorFor(Port& port, int connection) {
  if (port.doors.size() == 1) return port.doors.front();
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return port.doors.back();
  for (size_t i = 0; i + 1 < port.doors.size(); ++i) {
    std::atomic<int64_t>& user = *port.doors[i].user;
    if (user.load() == -1) user.store(peer.uid);
    if (user.load() == peer.uid) return port.doors[i];
  }
  return port.doors.back();
}

}  // namespace quern::daemon
