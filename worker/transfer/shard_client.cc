#include "worker/transfer/shard_client.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

constexpr absl::Duration kFinishPoll = absl::Milliseconds(50);

absl::Status CheckSent(uint64_t durable, uint64_t sent) {
  if (durable <= sent) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("the coordinator says that it has ", durable, " bytes of the shard, of which only ", sent, " were sent"));
}

}  // namespace

ShardClient::ShardClient(std::shared_ptr<DataLink> link, const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop,
                         const LinkOptions& options)
    : ResumingLink(std::move(link), options), attempt_(attempt), stop_(stop) {}

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

absl::Status ShardClient::Finish() {
  MutexLock lock(&mutex_);
  finish_ = true;
  Start();
  while (!finished_ && failure_.ok()) {
    changed_.WaitFor(&mutex_, kFinishPoll);
    if (*stop_) return absl::CancelledError("the task was stopped");
  }
  return failure_;
}

bool ShardClient::HasWork() { return begun_ && !finished_; }

bool ShardClient::AwaitsAnswer() { return finish_sent_ || sent_ - durable_ >= sync_every_; }

absl::StatusOr<std::string> ShardClient::AskForTicket(grpc::ClientContext* context) {
  quern::v1::WriteShardRequest request;
  *request.mutable_attempt() = attempt_;
  uint64_t most_sent;
  {
    MutexLock lock(&mutex_);
    most_sent = most_sent_;
    request.set_size(size_);
    request.set_durable(durable_);
    request.set_sync_every(sync_every_);
  }
  quern::v1::WriteShardResponse response;
  QUERN_RETURN_IF_ERROR(FromGrpc(link_->stub->WriteShard(context, request, &response)));
  const uint64_t durable = response.durable();
  if (durable < request.durable()) {
    return WithFailure(
        absl::DataLossError(absl::StrCat("the coordinator has ", durable, " bytes of the shard, and had ", request.durable())),
        quern::v1::LINK_LOST);
  }
  QUERN_RETURN_IF_ERROR(CheckSent(durable, most_sent));
  {
    MutexLock lock(&mutex_);
    sent_ = durable;
    finish_sent_ = false;
  }
  TakeDurable(durable);
  return response.ticket();
}

bool ShardClient::Take(LinkFrame* frame, absl::string_view* payload) {
  if (sent_ < given_) {
    const auto piece = std::find_if(pieces_.begin(), pieces_.end(), [next = sent_](const Piece& one) { return next < one.end(); });
    *payload = absl::string_view(reinterpret_cast<const char*>(piece->data + (sent_ - piece->offset)),
                                 std::min(kLargestChunk, piece->end() - sent_));
    *frame = {.kind = LinkFrame::Kind::kChunk, .offset = sent_};
    sent_ += payload->size();
    most_sent_ = std::max(most_sent_, sent_);
    return true;
  }
  if (!finish_ || finish_sent_ || sent_ < size_) return false;
  finish_sent_ = true;
  *frame = {.kind = LinkFrame::Kind::kFinish};
  return true;
}

absl::Status ShardClient::OnFrame(const LinkFrame& frame, LinkConnection&) {
  const bool finished = frame.kind == LinkFrame::Kind::kFinished;
  if ((!finished && frame.kind != LinkFrame::Kind::kDurable) || frame.size != 0) {
    return absl::UnavailableError("the coordinator's answer is garbled: it is not about the shard");
  }
  {
    MutexLock lock(&mutex_);
    QUERN_RETURN_IF_ERROR(CheckSent(frame.offset, sent_));
    if (finished && (!finish_sent_ || frame.offset != size_)) return absl::UnavailableError("the coordinator's answer is garbled");
    finished_ |= finished;
  }
  TakeDurable(frame.offset);
  return absl::OkStatus();
}

void ShardClient::TakeDurable(uint64_t durable) {
  std::vector<std::function<void(absl::Status)>> done;
  {
    MutexLock lock(&mutex_);
    durable_ = std::max(durable_, durable);
    while (!pieces_.empty() && pieces_.front().end() <= durable) {
      done.push_back(std::move(pieces_.front().done));
      pieces_.pop_front();
    }
    changed_.SignalAll();
  }
  for (const auto& one : done) one(absl::OkStatus());
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
