#include "worker/executor/framing.h"

#include <errno.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

constexpr size_t kHeaderSize = 4;
constexpr size_t kReadStep = 1 * kMiB;
constexpr absl::string_view kChannel = "executor channel";

// Bytes received: `size`, or fewer when the peer closed before.
absl::StatusOr<size_t> ReceiveUpTo(int socket, char* data, size_t size) {
  size_t done = 0;
  while (done < size) {
    const ssize_t n = recv(socket, data + done, size - done, 0);
    if (n > 0) {
      done += n;
    } else if (n == 0 || errno == ECONNRESET) {
      break;
    } else if (errno != EINTR) {
      return ErrnoToStatus(errno, "recv", kChannel);
    }
  }
  return done;
}

}  // namespace

absl::Status WriteFrame(int socket, const google::protobuf::MessageLite& message) {
  const size_t size = message.ByteSizeLong();
  if (size > kMaxFrameSize) {
    return absl::ResourceExhaustedError(absl::StrCat(kChannel, ": a message of ", FormatByteSize(size), " is above the limit of ",
                                                     FormatByteSize(kMaxFrameSize), "; a smaller --max-shard-size makes smaller tasks"));
  }
  std::string frame(kHeaderSize, '\0');
  for (size_t i = 0; i < kHeaderSize; ++i) frame[i] = static_cast<char>(size >> (8 * i));
  if (!message.AppendPartialToString(&frame)) return absl::InternalError(absl::StrCat(kChannel, ": a message could not be encoded"));
  size_t done = 0;
  while (done < frame.size()) {
    const ssize_t n = send(socket, frame.data() + done, frame.size() - done, MSG_NOSIGNAL);
    if (n >= 0) {
      done += n;
    } else if (errno == EPIPE || errno == ECONNRESET) {
      return absl::UnavailableError(absl::StrCat(kChannel, ": the other end is gone"));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return absl::DeadlineExceededError(absl::StrCat(kChannel, ": the other end does not read"));
    } else if (errno != EINTR) {
      return ErrnoToStatus(errno, "send", kChannel);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ReadFrame(int socket, google::protobuf::MessageLite* message) {
  char header[kHeaderSize];
  QUERN_ASSIGN_OR_RETURN(const size_t header_bytes, ReceiveUpTo(socket, header, kHeaderSize));
  if (header_bytes == 0) return false;
  if (header_bytes < kHeaderSize) return absl::DataLossError(absl::StrCat(kChannel, ": closed inside a message's size"));
  uint32_t size = 0;
  for (size_t i = 0; i < kHeaderSize; ++i) size |= uint32_t{static_cast<unsigned char>(header[i])} << (8 * i);
  if (size > kMaxFrameSize) {
    return absl::DataLossError(absl::StrCat(kChannel, ": a message of ", size, " bytes is announced, the limit is ", kMaxFrameSize));
  }
  std::string body;
  while (body.size() < size) {
    const size_t before = body.size();
    const size_t step = std::min<size_t>(size - before, kReadStep);
    body.resize(before + step);
    QUERN_ASSIGN_OR_RETURN(const size_t received, ReceiveUpTo(socket, body.data() + before, step));
    if (received < step) {
      return absl::DataLossError(absl::StrCat(kChannel, ": closed inside a message, after ", before + received, " of ", size, " bytes"));
    }
  }
  if (!message->ParseFromString(body)) {
    return absl::DataLossError(absl::StrCat(kChannel, ": ", size, " bytes that are no ", message->GetTypeName()));
  }
  return true;
}

}  // namespace quern::worker
