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
#include "worker/transfer/resuming_link.h"

namespace quern::worker {

// All ranges go through one connection, asked for ahead of their answers. A range that was cut is asked for again from its first byte that
// has not come. Each chunk is compared with its digest before it is taken.
class RangeClient : public RangeFetcher, private ResumingLink {
 public:
  // `stop` outlives it.
  RangeClient(std::shared_ptr<DataLink> link, const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop,
              const LinkOptions& options = {});
  ~RangeClient() override;

  absl::StatusOr<std::vector<uint64_t>> Check(const std::vector<std::string>& paths, bool headers) override;
  void Fetch(const std::string& path, uint64_t offset, std::byte* data, uint64_t size, std::function<void(absl::Status)> done) override;
  void Cancel() override { CancelLink(); }

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
  bool AwaitsAnswer() override QUERN_REQUIRES(mutex_);
  absl::StatusOr<std::string> AskForTicket(grpc::ClientContext* context) override;
  bool Take(LinkFrame* frame, absl::string_view* payload) override QUERN_REQUIRES(mutex_);
  absl::Status OnFrame(const LinkFrame& frame, LinkConnection& connection) override;
  void OnFailure(const absl::Status& status) override;

  const quern::v1::AttemptId attempt_;
  const std::atomic<bool>* const stop_;
  std::deque<Range> ranges_ QUERN_GUARDED_BY(mutex_);  // only the reading thread takes any out
  uint64_t next_number_ QUERN_GUARDED_BY(mutex_) = 0;
  size_t asked_ QUERN_GUARDED_BY(mutex_) = 0;  // of them, over this connection
  std::string last_path_ QUERN_GUARDED_BY(mutex_);
  absl::Status failure_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_RANGE_CLIENT_H_
