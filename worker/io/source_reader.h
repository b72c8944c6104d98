// Reading source files: one interface, three ways to read those of this machine (direct io_uring, buffered, mmap), and one that has the
// others fetched.
#ifndef QUERN_WORKER_IO_SOURCE_READER_H_
#define QUERN_WORKER_IO_SOURCE_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "worker/io/buffer_pool.h"
#include "worker/io/range_fetcher.h"
#include "worker/io/uring.h"

namespace quern::worker {

enum class ReaderMode { kAuto, kDirect, kBuffered, kMmap };

// "auto", "direct", "buffered" or "mmap"; else INVALID_ARGUMENT that lists them.
absl::StatusOr<ReaderMode> ParseReaderMode(absl::string_view name);

// A file open for reading. Never written to.
struct SourceHandle {
  std::string path;
  uint64_t size = 0;
  UniqueFd fd;           // buffered
  UniqueFd direct_fd;    // O_DIRECT; none where the filesystem or the mode does not have it
  bool fetched = false;  // not of this machine: there are no descriptors, and `path` is the coordinator's
};

// Opens a regular file; with `direct`, also for direct I/O: FAILED_PRECONDITION where the filesystem refuses that and `require_direct` is
// set.
absl::StatusOr<SourceHandle> OpenSource(const std::string& path, bool direct, bool require_direct);

struct ReadRequest {
  const SourceHandle* file = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;  // at least 1, less than 2 GiB
  // Aligned to kIoBlock, with BufferFor(offset, size) bytes. Byte `offset` lands at buffer + offset % kIoBlock.
  std::byte* buffer = nullptr;
  // Called once, from any thread. DATA_LOSS with the file and the offset when the file ended before the range or could not be read.
  std::function<void(absl::Status)> done;
};

constexpr uint64_t BufferFor(uint64_t offset, uint64_t size) { return RoundUp(offset % kIoBlock + size, kIoBlock); }

// Thread-safe. The destructor waits for all requests.
class SourceReader {
 public:
  virtual ~SourceReader() = default;
  // Starts a read. May block while many are in flight.
  virtual void Read(ReadRequest request) = 0;
  // Nobody waits for what is being read any more: reads that could take long end with CANCELLED, as do later ones.
  virtual void Cancel() {}
  // What was used so far: "direct", "buffered" or "mmap". kAuto says "buffered" once any file or read fell back to it.
  virtual absl::string_view name() const = 0;
};

// `uring` may be null: then kAuto reads buffered, and kDirect is FAILED_PRECONDITION. It must outlive the reader.
absl::StatusOr<std::unique_ptr<SourceReader>> NewSourceReader(ReaderMode mode, Uring* uring);

// Reads fetched files through `fetcher`, which must outlive it, and all others through `local`. Its name is "fetched" once a fetched file
// was read.
std::unique_ptr<SourceReader> NewFetchingReader(std::unique_ptr<SourceReader> local, RangeFetcher* fetcher);

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_SOURCE_READER_H_
