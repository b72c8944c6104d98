// Sends an attempt's shard to the coordinator.
#ifndef QUERN_WORKER_TRANSFER_SHARD_CLIENT_H_
#define QUERN_WORKER_TRANSFER_SHARD_CLIENT_H_

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "quern/v1/data.pb.h"
#include "worker/io/output_sink.h"
#include "worker/transfer/data_link.h"
#include "worker/transfer/resuming_link.h"

namespace quern::worker {

// Bytes stay in the memory of the caller until the coordinator has them on its disk; after a break it says how far that is, and the rest is
// sent from there.
class ShardClient : public OutputSink, private ResumingLink {
 public:
  // `stop` outlives it.
  ShardClient(std::shared_ptr<DataLink> link, const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop,
              const LinkOptions& options = {});
  ~ShardClient() override;

  absl::Status Begin(uint64_t size, uint64_t window) override;
  void Write(const std::byte* data, uint64_t size, std::function<void(absl::Status)> done) override;
  absl::Status Finish() override;
  void Cancel() override { CancelLink(); }

 private:
  struct Piece {
    uint64_t offset;
    const std::byte* data;
    uint64_t size;
    std::function<void(absl::Status)> done;
    uint64_t end() const { return offset + size; }
  };

  bool HasWork() override QUERN_REQUIRES(mutex_);
  bool AwaitsAnswer() override QUERN_REQUIRES(mutex_);
  absl::StatusOr<std::string> AskForTicket(grpc::ClientContext* context) override;
  bool Take(LinkFrame* frame, absl::string_view* payload) override QUERN_REQUIRES(mutex_);
  absl::Status OnFrame(const LinkFrame& frame, LinkConnection& connection) override;
  void OnFailure(const absl::Status& status) override;
  // Bytes [0, durable) are: gives back what they were in.
  void TakeDurable(uint64_t durable);

  const quern::v1::AttemptId attempt_;
  const std::atomic<bool>* const stop_;
  bool begun_ QUERN_GUARDED_BY(mutex_) = false;
  uint64_t size_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t sync_every_ QUERN_GUARDED_BY(mutex_) = 0;
  std::deque<Piece> pieces_ QUERN_GUARDED_BY(mutex_);  // not all durable; only the reading thread takes any out
  uint64_t given_ QUERN_GUARDED_BY(mutex_) = 0;        // bytes [0, given_) were given to Write
  uint64_t durable_ QUERN_GUARDED_BY(mutex_) = 0;
  bool finish_ QUERN_GUARDED_BY(mutex_) = false;
  bool finished_ QUERN_GUARDED_BY(mutex_) = false;
  absl::Status failure_ QUERN_GUARDED_BY(mutex_);
  // Of this connection.
  uint64_t sent_ QUERN_GUARDED_BY(mutex_) = 0;  // bytes [0, sent_) are there or on their way
  bool finish_sent_ QUERN_GUARDED_BY(mutex_) = false;
  uint64_t most_sent_ QUERN_GUARDED_BY(mutex_) = 0;  // over any connection
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_SHARD_CLIENT_H_
