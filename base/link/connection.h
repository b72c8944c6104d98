// A connection of the data plane: bytes both ways over a stream socket, plain or by TLS.
#ifndef QUERN_BASE_LINK_CONNECTION_H_
#define QUERN_BASE_LINK_CONNECTION_H_

#include <openssl/ssl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/link/socket_bio.h"
#include "base/mutex.h"

namespace quern {

// A peer that has moved no byte for so long is given up.
inline constexpr absl::Duration kLinkPatience = absl::Minutes(1);

// One thread may read while another writes; Shutdown is for any thread. What waits for the peer does so as long as it moves something now
// and then: DEADLINE_EXCEEDED after the connection's patience without. A connection that broke or was ended is UNAVAILABLE, and so is one
// whose other side speaks no TLS or has the wrong certificate, for certificates are renewed.
class LinkConnection {
 public:
  // Takes a connected stream socket. A peer whose machine is gone without a word is noticed after about 20 s.
  explicit LinkConnection(UniqueFd socket, absl::Duration patience = kLinkPatience);
  ~LinkConnection();
  LinkConnection(const LinkConnection&) = delete;
  LinkConnection& operator=(const LinkConnection&) = delete;

  // From here on by TLS. Before anything is read or written; `context` is not needed afterwards. The client makes sure that the server's
  // certificate is of `host`, a name or an address. `wanted`, asked every 50 ms, ends it with CANCELLED.
  absl::Status BeTlsClient(SSL_CTX* context, const std::string& host, absl::Duration within, const std::function<bool()>& wanted);
  absl::Status BeTlsServer(SSL_CTX* context, absl::Duration within);

  // All of `data`. After an error the peer has a part of it, and there is no sense in writing more: UNAVAILABLE.
  absl::Status Write(const void* data, size_t size);
  // Exactly `size` bytes, at least one. False when the peer has ended its side before the first of them. DEADLINE_EXCEEDED also when they
  // are not there after `within`, however slowly they come.
  absl::StatusOr<bool> Read(void* data, size_t size, absl::Duration within = absl::InfiniteDuration());
  // Whether there is something to read, or the end, within that time.
  absl::StatusOr<bool> Await(absl::Duration within);

  // Ends both sides at once.
  void Shutdown();
  // Ends this side, and waits for the peer to have taken all of it and ended its own: closed while bytes are on their way here, a socket
  // throws away those on their way there. By the thread that reads, while none writes.
  void Finish(absl::Duration within);

 private:
  enum class Want { kNothing, kRead, kWrite };
  // One step that does not block: the bytes moved, or what it waits for. 0 bytes of Want::kNothing: the peer's end.
  struct Step {
    size_t moved = 0;
    Want want = Want::kNothing;
    absl::Status status;
  };
  Step TryRead(void* data, size_t size);
  Step TryWrite(const void* data, size_t size);
  Step FlushWritten();
  Step TlsStep(int result, const char* what) QUERN_REQUIRES(tls_mutex_);
  Step FlushTls() QUERN_REQUIRES(tls_mutex_);
  // False when the time is over.
  absl::StatusOr<bool> WaitFor(Want want, absl::Duration within);
  // For the reading thread: WaitFor(kRead) returns when so many bytes are there, and not at each packet, unless the peer ends its side.
  void SetLowWater(size_t bytes);
  absl::Status Handshake(SSL_CTX* context, absl::Duration within, const std::function<bool()>& wanted,
                         const std::function<bool(SSL*)>& prepare);

  struct FreeTls {
    void operator()(SSL* tls) const { SSL_free(tls); }
  };
  const UniqueFd socket_;
  const absl::Duration patience_;
  bool is_tls_ = false;   // set before there are two threads
  size_t low_water_ = 1;  // of the reading thread
  bool cut_ = false;      // of the writing thread: a Write has failed
  Mutex tls_mutex_;       // held for single steps, never while waiting
  SocketBio tls_socket_ QUERN_GUARDED_BY(tls_mutex_);
  std::unique_ptr<SSL, FreeTls> tls_ QUERN_GUARDED_BY(tls_mutex_);
};

}  // namespace quern

#endif  // QUERN_BASE_LINK_CONNECTION_H_
