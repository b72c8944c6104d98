// What TLS reads from and writes to: a socket that does not block, with a buffer each way.
#ifndef QUERN_BASE_LINK_SOCKET_BIO_H_
#define QUERN_BASE_LINK_SOCKET_BIO_H_

#include <openssl/bio.h>

#include <cstddef>
#include <memory>

namespace quern {

// TLS moves a record of 16 KiB at a time, in two pieces. The kernel acknowledges what is read at a time, and sends what is written at a
// time, which costs more than to copy it. And OpenSSL's own socket BIO raises SIGPIPE. Not thread-safe.
class SocketBio {
 public:
  explicit SocketBio(int socket) : socket_(socket) {}
  SocketBio(const SocketBio&) = delete;
  SocketBio& operator=(const SocketBio&) = delete;

  // For one SSL, which owns it, and which this outlives. nullptr: no memory.
  BIO* NewBio();

  bool has_input() const { return in_begin_ < in_end_; }
  // Sends what was written, as far as the socket takes it. The error of the system, or 0.
  int Flush();
  bool has_output() const { return out_begin_ < out_end_; }

 private:
  static int Write(BIO* bio, const char* data, int size);
  static int Read(BIO* bio, char* data, int size);
  static long Control(BIO* bio, int command, long, void*);

  static constexpr size_t kSize = 128 << 10;
  const int socket_;
  std::unique_ptr<char[]> in_, out_;
  bool at_end_ = false;  // of what the peer sends
  size_t in_begin_ = 0, in_end_ = 0;
  size_t out_begin_ = 0, out_end_ = 0;
};

}  // namespace quern

#endif  // QUERN_BASE_LINK_SOCKET_BIO_H_
