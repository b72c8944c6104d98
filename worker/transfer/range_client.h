// Fetches ranges of source files from the coordinator.
#ifndef QUERN_WORKER_TRANSFER_RANGE_CLIENT_H_
#define QUERN_WORKER_TRANSFER_RANGE_CLIENT_H_

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "quern/v1/data.pb.h"
#include "worker/io/range_fetcher.h"
#include "worker/transfer/data_link.h"
#include "worker/transfer/resuming_stream.h"

namespace quern::worker {

// All ranges go through one stream, asked for ahead of their answers, many small ones in a message. A range that was cut is asked for again
// from its first byte that has not come. Each chunk is compared with its digest before it is taken.
class RangeClient : public RangeFetcher, private ResumingStream<quern::v1::ReadSourceRequest, quern::v1::ReadSourceResponse> {
 public:
  // `stop` outlives it.
  RangeClient(std::shared_ptr<DataLink> link, const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop,
              const LinkOptions& options = {});
  ~RangeClient() override;

  absl::StatusOr<std::vector<uint64_t>> Check(const std::vector<std::string>& paths, bool headers) override;
  void Fetch(const std::string& path, uint64_t offset, std::byte* data, uint64_t size, std::function<void(absl::Status)> done) override;
  void Cancel() override { CancelStream(); }

 private:
  struct Range {
    uint64_t number;
    std::string path;
    uint64_t offset;
    uint64_t size;
    uint64_t have;  // bytes that have come
    std::byte* data;
    std::function<void(absl::Status)> done;
  };

  bool HasWork() override QUERN_REQUIRES(mutex_);
  void OnOpen() override QUERN_REQUIRES(mutex_);
  bool Take(quern::v1::ReadSourceRequest* request) override QUERN_REQUIRES(mutex_);
  absl::Status OnResponse(const quern::v1::ReadSourceResponse& response) override;
  void OnFailure(const absl::Status& status) override;
  absl::Status OnChunk(const quern::v1::Chunk& chunk);

  const std::shared_ptr<DataLink> link_;
  const quern::v1::AttemptId attempt_;
  const std::atomic<bool>* const stop_;
  const LinkOptions options_;
  std::deque<Range> ranges_ QUERN_GUARDED_BY(mutex_);  // only the reading thread takes any out
  uint64_t next_number_ QUERN_GUARDED_BY(mutex_) = 0;
  size_t asked_ QUERN_GUARDED_BY(mutex_) = 0;  // of them, over this connection
  bool opened_ QUERN_GUARDED_BY(mutex_) = false;
  std::string last_path_ QUERN_GUARDED_BY(mutex_);
  absl::Status failure_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_RANGE_CLIENT_H_
