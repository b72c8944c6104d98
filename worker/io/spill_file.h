// A file without a name beside the output, for side tensors that the pool cannot hold until their turn. It goes through the page cache:
// small pieces at any offset, by any thread. A file of its own, since buffered and direct writes to one file must not meet in a page.
#ifndef QUERN_WORKER_IO_SPILL_FILE_H_
#define QUERN_WORKER_IO_SPILL_FILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"

namespace quern::worker {

// Thread-safe for disjoint ranges. Its blocks are freed with the object, also when the process is killed.
class SpillFile {
 public:
  // Creates and unlinks `path` and allocates `size` bytes of zeros: RESOURCE_EXHAUSTED with "disk full" when there is no room.
  // Filesystems that cannot allocate ahead say so at a Write. `explain` (may be empty) makes of either what the caller is told; it is
  // called from any thread.
  using Explain = std::function<absl::Status(const absl::Status& full)>;
  static absl::StatusOr<std::unique_ptr<SpillFile>> Create(const std::string& path, uint64_t size, Explain explain);
  absl::Status Read(uint64_t offset, std::byte* data, uint64_t size) const { return ReadExactly(fd_.get(), offset, data, size, path_); }
  absl::Status Write(uint64_t offset, const std::byte* data, uint64_t size) {
    return Explained(WriteExactly(fd_.get(), offset, data, size, path_));
  }

 private:
  SpillFile(std::string path, Explain explain) : path_(std::move(path)), explain_(std::move(explain)) {}
  absl::Status Allocate(uint64_t size);
  absl::Status Explained(const absl::Status& status) const;
  const std::string path_;
  const Explain explain_;
  UniqueFd fd_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_SPILL_FILE_H_
