#include "worker/transfer/resuming_link.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/channel/await_connected.h"
#include "base/channel/deadline.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "worker/transfer/link_status.h"

namespace quern::worker {
namespace {

// Long enough to take the space of a shard on a slow disk.
constexpr absl::Duration kTicketTimeout = absl::Minutes(2);
// Small frames go together.
constexpr size_t kFewBytes = 16 << 10;

}  // namespace

void ResumingLink::Start() {
  if (!reader_.joinable()) {
    reader_ = std::thread([this] { RunReader(); });
    writer_ = std::thread([this] { RunWriter(); });
  }
  changed_.SignalAll();
}

void ResumingLink::CancelLink() {
  MutexLock lock(&mutex_);
  cancelled_ = true;
  if (context_ != nullptr) context_->TryCancel();
  if (connection_ != nullptr) connection_->Shutdown();
  changed_.SignalAll();
}

void ResumingLink::Close() {
  CancelLink();
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    changed_.SignalAll();
  }
  if (reader_.joinable()) reader_.join();
  if (writer_.joinable()) writer_.join();
}

bool ResumingLink::AwaitWork(grpc::ClientContext* context) {
  MutexLock lock(&mutex_);
  while (!cancelled_ && !closing_ && (failed_ || !HasWork())) changed_.Wait(&mutex_);
  if (cancelled_ || closing_) return false;
  context_ = context;
  return true;
}

bool ResumingLink::IsWanted() {
  MutexLock lock(&mutex_);
  return !cancelled_ && !closing_;
}

absl::Status ResumingLink::AwaitRetry(const absl::Status& status, absl::Duration pause) {
  MutexLock lock(&mutex_);
  context_ = nullptr;
  if (!HasWork()) failing_since_ = absl::InfiniteDuration();
  if (cancelled_ || closing_ || !HasWork()) return absl::OkStatus();
  if (!IsPassing(status)) return status;
  const absl::Duration now = Clock::Real()->Monotonic();
  failing_since_ = std::min(failing_since_, now);
  if (now - failing_since_ >= options_.give_up) return LinkLost(now - failing_since_, status);
  for (absl::Duration left = pause; left > absl::ZeroDuration() && !cancelled_ && !closing_;) {
    changed_.WaitFor(&mutex_, left);
    left = now + pause - Clock::Real()->Monotonic();
  }
  return absl::OkStatus();
}

absl::Status ResumingLink::Carry(grpc::ClientContext* context, absl::Duration* pause) {
  const auto wanted = [this] { return IsWanted(); };
  AwaitConnected(*link_->channel, options_.connect, wanted);
  context->set_deadline(DeadlineIn(kTicketTimeout));
  QUERN_ASSIGN_OR_RETURN(const std::string ticket, AskForTicket(context));
  QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<LinkConnection> connection, link_->dialer.Dial(ticket, options_.connect, wanted));
  {
    MutexLock lock(&mutex_);
    if (cancelled_ || closing_) return absl::CancelledError("the transfer was stopped");
    connection_ = connection.get();
    write_failed_ = false;
    changed_.SignalAll();
  }
  const absl::Status status = ReadFrames(*connection, pause);
  connection->Shutdown();
  MutexLock lock(&mutex_);
  connection_ = nullptr;
  while (writing_) changed_.Wait(&mutex_);
  return status;
}

absl::Status ResumingLink::ReadFrames(LinkConnection& connection, absl::Duration* pause) {
  while (true) {
    bool owed;
    {
      MutexLock lock(&mutex_);
      owed = AwaitsAnswer();
    }
    QUERN_ASSIGN_OR_RETURN(const bool there, connection.Await(kLinkPatience));
    if (!there) {
      MutexLock lock(&mutex_);
      // What was asked for meanwhile has its own minute.
      if (!owed || !AwaitsAnswer()) continue;
      return absl::DeadlineExceededError("the coordinator is silent");
    }
    QUERN_ASSIGN_OR_RETURN(const std::optional<LinkFrame> frame, ReadFrameHead(connection));
    if (!frame.has_value()) return absl::UnavailableError("the coordinator ended the connection");
    if (frame->kind == LinkFrame::Kind::kEnd) {
      std::string end(frame->size, '\0');
      QUERN_RETURN_IF_ERROR(ReadPayload(connection, end.data(), end.size()));
      QUERN_RETURN_IF_ERROR(FromErrorStatus(end));
      return absl::UnavailableError("the coordinator ended the connection");
    }
    QUERN_RETURN_IF_ERROR(OnFrame(*frame, connection));
    *pause = options_.first_pause;
    MutexLock lock(&mutex_);
    failing_since_ = absl::InfiniteDuration();
  }
}

void ResumingLink::RunReader() {
  absl::Duration pause = options_.first_pause;
  while (true) {
    grpc::ClientContext context;
    if (!AwaitWork(&context)) break;
    const absl::Status status = Carry(&context, &pause);
    const absl::Status failure = AwaitRetry(status, pause);
    pause = std::min(2 * pause, options_.longest_pause);
    if (failure.ok()) continue;
    {
      MutexLock lock(&mutex_);
      failed_ = true;
    }
    OnFailure(failure);
  }
  bool failed;
  {
    MutexLock lock(&mutex_);
    failed = std::exchange(failed_, true);
  }
  if (!failed) OnFailure(absl::CancelledError("the transfer was stopped"));
}

void ResumingLink::RunWriter() {
  std::string bytes;
  while (true) {
    LinkConnection* connection;
    LinkFrame frame;
    absl::string_view payload;
    bytes.clear();
    {
      MutexLock lock(&mutex_);
      while (!closing_ && (connection_ == nullptr || write_failed_ || !Take(&frame, &payload))) changed_.Wait(&mutex_);
      if (closing_) return;
      connection = connection_;
      writing_ = true;
      while (frame.kind != LinkFrame::Kind::kChunk) {
        AppendFrame(frame, payload, &bytes);
        payload = {};
        if (bytes.size() >= kFewBytes || !Take(&frame, &payload)) break;
      }
    }
    if (!payload.empty()) {
      frame.size = static_cast<uint32_t>(payload.size());
      frame.xxh3 = Xxh3Of(payload.data(), payload.size());
      AppendFrameHead(frame, &bytes);
    }
    absl::Status written = connection->Write(bytes.data(), bytes.size());
    if (written.ok()) written = connection->Write(payload.data(), payload.size());
    MutexLock lock(&mutex_);
    writing_ = false;
    write_failed_ = !written.ok();
    // The reading thread is not to wait for answers to what has not arrived.
    if (write_failed_) connection->Shutdown();
    changed_.SignalAll();
  }
}

}  // namespace quern::worker
