// Where the bytes of files come from that this machine does not see.
#ifndef QUERN_WORKER_IO_RANGE_FETCHER_H_
#define QUERN_WORKER_IO_RANGE_FETCHER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace quern::worker {

// Thread-safe. The destructor cancels.
class RangeFetcher {
 public:
  virtual ~RangeFetcher() = default;

  // Whether the files still are what was planned; returns their sizes. With `headers` the digests of their headers are compared as well.
  // Errors name the file; one that changed carries the failure SOURCE_CHANGED. Blocks, also while the other side is away.
  virtual absl::StatusOr<std::vector<uint64_t>> Check(const std::vector<std::string>& paths, bool headers) = 0;

  // Starts to fetch `size` bytes (at least 1) at `offset` into `data`, which must stay until `done` has been called: once, from any thread.
  // Does not block. Ranges come in the order in which they were asked for.
  virtual void Fetch(const std::string& path, uint64_t offset, std::byte* data, uint64_t size, std::function<void(absl::Status)> done) = 0;

  // Ends all that is under way and all that comes later with CANCELLED, soon.
  virtual void Cancel() = 0;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_RANGE_FETCHER_H_
