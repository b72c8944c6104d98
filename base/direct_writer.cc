#include "base/direct_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace quern {
namespace {

constexpr uint64_t kBuffer = kMiB;

// Direct writes need memory at a multiple of a block. One a thread: files may be many, and those that write them few.
char* OwnBuffer() {
  thread_local const BlockBuffer buffer = NewBlockBuffer(kBuffer);
  return buffer.get();
}

}  // namespace

BlockBuffer NewBlockBuffer(size_t size) {
  return BlockBuffer(static_cast<char*>(
      aligned_alloc(DirectWriter::kBlock, (size + DirectWriter::kBlock - 1) / DirectWriter::kBlock * DirectWriter::kBlock)));
}

bool DirectWriter::SetDirect(int fd, bool direct) {
  if (direct == direct_) return true;
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) != 0) return false;
  direct_ = direct;
  return true;
}

absl::Status DirectWriter::WriteThrough(int fd, uint64_t offset, const char* data, size_t size, absl::string_view path) {
  if (size == 0) return absl::OkStatus();
  if (!SetDirect(fd, false)) return ErrnoToStatus(errno, "fcntl", path);
  QUERN_RETURN_IF_ERROR(WriteExactly(fd, offset, data, size, path));
  // A hint: writing back starts now, and an fsync has less to wait for.
  sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(size), SYNC_FILE_RANGE_WRITE);
  return absl::OkStatus();
}

absl::Status DirectWriter::Write(int fd, uint64_t offset, const void* data, size_t size, absl::string_view path) {
  const char* from = static_cast<const char*>(data);
  char* const buffer = refused_ ? nullptr : OwnBuffer();
  while (buffer != nullptr && offset % kBlock == 0 && size >= kBlock && SetDirect(fd, true)) {
    const size_t part = std::min<size_t>(kBuffer, size / kBlock * kBlock);
    const bool aligned = reinterpret_cast<uintptr_t>(from) % kBlock == 0;
    if (!aligned) memcpy(buffer, from, part);
    const ssize_t written = pwrite(fd, aligned ? from : buffer, part, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL) {
      refused_ = true;
      break;
    }
    if (written < 0) return ErrnoToStatus(errno, "write", path);
    from += written;
    offset += static_cast<uint64_t>(written);
    size -= static_cast<size_t>(written);
  }
  return WriteThrough(fd, offset, from, size, path);
}

}  // namespace quern
