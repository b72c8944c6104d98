#include "base/link/socket_bio.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>

namespace quern {

BIO* SocketBio::NewBio() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "buffered socket");
    BIO_meth_set_write(made, Write);
    BIO_meth_set_read(made, Read);
    BIO_meth_set_ctrl(made, Control);
    return made;
  }();
  BIO* const bio = BIO_new(method);
  if (bio == nullptr) return nullptr;
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  return bio;
}

int SocketBio::Flush() {
  while (has_output()) {
    const ssize_t n = send(socket_, out_.get() + out_begin_, out_end_ - out_begin_, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN ? 0 : errno;
    out_begin_ += n;
  }
  out_begin_ = out_end_ = 0;
  return 0;
}

int SocketBio::Write(BIO* bio, const char* data, int size) {
  SocketBio& self = *static_cast<SocketBio*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  if (self.out_ == nullptr) self.out_ = std::make_unique<char[]>(kSize);
  if (self.out_end_ == kSize) {
    if (const int error = self.Flush(); error != 0) {
      errno = error;
      return -1;
    }
    if (self.has_output()) {
      BIO_set_retry_write(bio);
      return -1;
    }
  }
  const size_t taken = std::min<size_t>(size, kSize - self.out_end_);
  memcpy(self.out_.get() + self.out_end_, data, taken);
  self.out_end_ += taken;
  return static_cast<int>(taken);
}

long SocketBio::Control(BIO* bio, int command, long, void*) {
  if (command == BIO_CTRL_EOF) return static_cast<SocketBio*>(BIO_get_data(bio))->at_end_ ? 1 : 0;
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

int SocketBio::Read(BIO* bio, char* data, int size) {
  SocketBio& self = *static_cast<SocketBio*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  if (!self.has_input()) {
    if (self.in_ == nullptr) self.in_ = std::make_unique<char[]>(kSize);
    const ssize_t n = recv(self.socket_, self.in_.get(), kSize, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
    self.at_end_ = n == 0;
    if (n <= 0) return static_cast<int>(n);
    self.in_begin_ = 0;
    self.in_end_ = n;
  }
  const size_t given = std::min<size_t>(size, self.in_end_ - self.in_begin_);
  memcpy(data, self.in_.get() + self.in_begin_, given);
  self.in_begin_ += given;
  return static_cast<int>(given);
}

}  // namespace quern
