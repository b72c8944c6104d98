// Fetches the result of a job into a directory here, and goes on where an earlier try ended.
#ifndef QUERN_CLIENT_DOWNLOAD_H_
#define QUERN_CLIENT_DOWNLOAD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/tls_files.h"
#include "client/interrupt.h"
#include "quern/v1/data.grpc.pb.h"

namespace quern::client {

// Bytes of a file as they came.
struct ResultChunk {
  uint64_t offset = 0;
  uint64_t xxh3 = 0;  // XXH3-64 of the bytes before they were sent
  std::string data;
};

// Where results come from. All methods block.
class ResultSource {
 public:
  virtual ~ResultSource() = default;
  virtual absl::StatusOr<quern::v1::ListResultResponse> List() = 0;
  // Calls `take` with the chunks of a file from `offset` on, in order, until its end, an error of `take`, which is returned, or one of the
  // link. `take` may keep a chunk's bytes and leave others in their place.
  virtual absl::Status Read(const std::string& name, uint64_t offset, const std::function<absl::Status(ResultChunk&)>& take) = 0;
};

// `channel` is to `server`. `interrupt` outlives it. An interrupt ends what blocks with CANCELLED.
std::unique_ptr<ResultSource> NewResultSource(std::shared_ptr<grpc::Channel> channel, const std::string& server, const TlsFiles& tls,
                                              std::string job, Interrupt* interrupt);

struct DownloadOptions {
  // Between tries after the link broke, doubled up to the longest; and how long it may stay broken.
  absl::Duration first_pause = absl::Milliseconds(200);
  absl::Duration longest_pause = absl::Seconds(10);
  absl::Duration give_up = absl::Minutes(5);
  // Blocks for about so long; false when the user has asked to stop.
  std::function<bool(absl::Duration)> wait;
  // Bytes that are here, of all.
  std::function<void(const std::string& file, uint64_t have, uint64_t total)> progress = [](const std::string&, uint64_t, uint64_t) {};
  Clock* clock = Clock::Real();
};

// Each file grows as NAME.part, is compared with the SHA-256 of the list, fsynced, and gets its name at once; names that make a directory a
// checkpoint come last. Files that are here already are compared and kept. ALREADY_EXISTS, before anything is fetched, when a name of the
// result is taken by a file with another content: nothing is ever replaced. DATA_LOSS when what came does not have its digest. Returns the
// list. Blocks.
absl::StatusOr<quern::v1::ListResultResponse> Download(ResultSource& source, const std::string& directory, const DownloadOptions& options);

}  // namespace quern::client

#endif  // QUERN_CLIENT_DOWNLOAD_H_
