// Writes large files past the page cache.
#ifndef QUERN_BASE_DIRECT_WRITER_H_
#define QUERN_BASE_DIRECT_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quern {

// For one open file, which nobody reads soon: it does not drive out of memory what others read, and costs no pages. Whole blocks at
// multiples of a block are written directly; the rest, and everything where the filesystem refuses that, through the page cache, where
// writing back starts at once. Not thread-safe.
class DirectWriter {
 public:
  // Of offsets and sizes.
  static constexpr uint64_t kBlock = 4096;

  // Like WriteExactly (base/file.h), also in what is durable afterwards: nothing. Sets and clears O_DIRECT of `fd`. Blocks.
  absl::Status Write(int fd, uint64_t offset, const void* data, size_t size, absl::string_view path);

 private:
  // The status flags of `fd` as they should be; false when they cannot.
  bool SetDirect(int fd, bool direct);
  absl::Status WriteThrough(int fd, uint64_t offset, const char* data, size_t size, absl::string_view path);

  bool direct_ = false;
  bool refused_ = false;
};

// Memory at a multiple of a block: what is written from its beginning is not copied first. nullptr: there is none.
struct FreeBlockBuffer {
  void operator()(char* buffer) const { free(buffer); }
};
using BlockBuffer = std::unique_ptr<char, FreeBlockBuffer>;
BlockBuffer NewBlockBuffer(size_t size);

}  // namespace quern

#endif  // QUERN_BASE_DIRECT_WRITER_H_
