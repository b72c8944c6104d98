#include "worker/transfer/shard_client.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/data_plane.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

using quern::v1::WriteShardRequest;
using quern::v1::WriteShardResponse;

constexpr absl::Duration kFinishPoll = absl::Milliseconds(50);

}  // namespace

ShardClient::ShardClient(std::shared_ptr<DataLink> link, const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop,
                         const LinkOptions& options)
    : ResumingStream(
          link->channel, [link](grpc::ClientContext* context) { return link->stub->WriteShard(context); }, options),
      attempt_(attempt),
      stop_(stop) {}

ShardClient::~ShardClient() { Close(); }

absl::Status ShardClient::Begin(uint64_t size, uint64_t window) {
  MutexLock lock(&mutex_);
  begun_ = true;
  size_ = size;
  // Twice in a window: one part is being synced while the next comes in.
  sync_every_ = std::max<uint64_t>(window / 2, 1);
  // The file is made, and its space taken, before there is anything to send.
  Start();
  return absl::OkStatus();
}

void ShardClient::Write(const std::byte* data, uint64_t size, std::function<void(absl::Status)> done) {
  absl::Status failure;
  {
    MutexLock lock(&mutex_);
    failure = failure_;
    if (failure.ok()) {
      pieces_.push_back({given_, data, size, std::move(done)});
      given_ += size;
      Start();
      return;
    }
  }
  done(failure);
}

absl::Status ShardClient::Finish(const std::string& sha256) {
  MutexLock lock(&mutex_);
  finish_ = true;
  sha256_ = sha256;
  Start();
  while (!finished_ && failure_.ok()) {
    changed_.WaitFor(&mutex_, kFinishPoll);
    if (*stop_) return absl::CancelledError("the task was stopped");
  }
  return failure_;
}

bool ShardClient::HasWork() { return begun_ && !finished_; }

void ShardClient::OnOpen() {
  open_sent_ = false;
  answered_ = false;
  finish_sent_ = false;
}

bool ShardClient::Take(WriteShardRequest* request) {
  fill_data_ = nullptr;
  if (!open_sent_) {
    open_sent_ = true;
    WriteShardRequest::Open& open = *request->mutable_open();
    *open.mutable_attempt() = attempt_;
    open.set_size(size_);
    open.set_durable(durable_);
    open.set_sync_every(sync_every_);
    return true;
  }
  if (!answered_) return false;
  if (sent_ < given_) {
    const auto piece = std::find_if(pieces_.begin(), pieces_.end(), [next = sent_](const Piece& one) { return next < one.end(); });
    fill_data_ = piece->data + (sent_ - piece->offset);
    fill_size_ = std::min(kLargestChunk, piece->end() - sent_);
    request->mutable_chunk()->set_offset(sent_);  // of the chunk before only the memory is used again
    sent_ += fill_size_;
    return true;
  }
  if (!finish_ || finish_sent_ || sent_ < size_) return false;
  finish_sent_ = true;
  request->set_finish(sha256_);
  return true;
}

void ShardClient::Fill(WriteShardRequest* request) {
  if (fill_data_ == nullptr) return;
  quern::v1::Chunk& chunk = *request->mutable_chunk();
  chunk.mutable_data()->assign(reinterpret_cast<const char*>(fill_data_), fill_size_);
  chunk.set_xxh3(Xxh3Of(chunk.data().data(), chunk.data().size()));
}

absl::Status ShardClient::OnResponse(const WriteShardResponse& response) {
  std::vector<std::function<void(absl::Status)>> done;
  {
    MutexLock lock(&mutex_);
    const uint64_t durable = response.durable();
    if (durable < durable_) {
      return WithFailure(absl::DataLossError(absl::StrCat("the coordinator has ", durable, " bytes of the shard, and had ", durable_)),
                         quern::v1::LINK_LOST);
    }
    if (durable > (answered_ ? sent_ : given_)) {
      return absl::DataLossError(
          absl::StrCat("the coordinator says that it has ", durable, " bytes of the shard, of which only ", given_, " were sent"));
    }
    if (!answered_) {
      answered_ = true;
      sent_ = durable;
    }
    durable_ = durable;
    while (!pieces_.empty() && pieces_.front().end() <= durable) {
      done.push_back(std::move(pieces_.front().done));
      pieces_.pop_front();
    }
    finished_ = response.finished() && finish_;
    changed_.SignalAll();
  }
  for (const auto& one : done) one(absl::OkStatus());
  return absl::OkStatus();
}

void ShardClient::OnFailure(const absl::Status& status) {
  const absl::Status told = absl::IsCancelled(status) ? status : Annotate(status, "send the shard");
  std::deque<Piece> pieces;
  {
    MutexLock lock(&mutex_);
    failure_ = told;
    pieces.swap(pieces_);
    changed_.SignalAll();
  }
  for (Piece& piece : pieces) piece.done(told);
}

}  // namespace quern::worker
