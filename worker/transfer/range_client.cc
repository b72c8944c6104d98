#include "worker/transfer/range_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/channel/await_connected.h"
#include "base/channel/deadline.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

// Long enough to digest a large header from a slow disk.
constexpr absl::Duration kCheckTimeout = absl::Seconds(30);
constexpr absl::Duration kStopPoll = absl::Milliseconds(50);

absl::Status Garbled(absl::string_view what) { return absl::UnavailableError(absl::StrCat("the coordinator's answer is garbled: ", what)); }

}  // namespace

RangeClient::RangeClient(std::shared_ptr<DataLink> link, const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop,
                         const LinkOptions& options)
    : ResumingLink(std::move(link), options), attempt_(attempt), stop_(stop) {}

RangeClient::~RangeClient() { Close(); }

absl::StatusOr<std::vector<uint64_t>> RangeClient::Check(const std::vector<std::string>& paths, bool headers) {
  quern::v1::CheckSourceRequest request;
  *request.mutable_attempt() = attempt_;
  request.mutable_paths()->Assign(paths.begin(), paths.end());
  request.set_headers(headers);
  const absl::Duration began = Clock::Real()->Monotonic();
  absl::Duration pause = options_.first_pause;
  while (true) {
    AwaitConnected(*link_->channel, options_.connect, [this] { return !*stop_; });
    grpc::ClientContext context;
    context.set_deadline(DeadlineIn(kCheckTimeout));
    quern::v1::CheckSourceResponse response;
    absl::Status status = FromGrpc(link_->stub->CheckSource(&context, request, &response));
    if (status.ok() && response.sizes_size() == request.paths_size()) {
      return std::vector<uint64_t>(response.sizes().begin(), response.sizes().end());
    }
    if (status.ok()) status = Garbled("a file has no size");
    if (!IsPassing(status)) return status;
    const absl::Duration tried = Clock::Real()->Monotonic() - began;
    if (tried >= options_.give_up) return LinkLost(tried, status);
    const absl::Duration until = Clock::Real()->Monotonic() + pause;
    pause = std::min(2 * pause, options_.longest_pause);
    MutexLock lock(&mutex_);
    while (!*stop_ && Clock::Real()->Monotonic() < until) changed_.WaitFor(&mutex_, kStopPoll);
    if (*stop_) return absl::CancelledError("the task was stopped");
  }
}

void RangeClient::Fetch(const std::string& path, uint64_t offset, std::byte* data, uint64_t size, std::function<void(absl::Status)> done) {
  absl::Status failure;
  {
    MutexLock lock(&mutex_);
    failure = failure_;
    if (failure.ok()) {
      ranges_.push_back({next_number_++, path, offset, size, 0, data, std::move(done)});
      Start();
      return;
    }
  }
  done(failure);
}

bool RangeClient::HasWork() { return !ranges_.empty(); }

bool RangeClient::AwaitsAnswer() { return asked_ > 0; }

absl::StatusOr<std::string> RangeClient::AskForTicket(grpc::ClientContext* context) {
  {
    MutexLock lock(&mutex_);
    asked_ = 0;
    last_path_.clear();
  }
  quern::v1::ReadSourceRequest request;
  *request.mutable_attempt() = attempt_;
  quern::v1::ReadSourceResponse response;
  QUERN_RETURN_IF_ERROR(FromGrpc(link_->stub->ReadSource(context, request, &response)));
  return response.ticket();
}

bool RangeClient::Take(LinkFrame* frame, absl::string_view* payload) {
  if (asked_ == ranges_.size()) return false;
  const Range& range = ranges_[asked_++];
  *frame = {.kind = LinkFrame::Kind::kRange, .range = range.number, .offset = range.offset + range.have, .length = range.size - range.have};
  if (range.path != last_path_) *payload = last_path_ = range.path;
  return true;
}

absl::Status RangeClient::OnFrame(const LinkFrame& frame, LinkConnection& connection) {
  if (frame.kind != LinkFrame::Kind::kChunk) return Garbled("it is no chunk");
  Range* range;
  {
    MutexLock lock(&mutex_);
    if (ranges_.empty() || asked_ == 0) return Garbled("nothing was asked for");
    range = &ranges_.front();
  }
  if (frame.range != range->number || frame.offset != range->offset + range->have || frame.size == 0 ||
      frame.size > range->size - range->have) {
    return Garbled(absl::StrCat("bytes at ", frame.offset, " of range ", frame.range, " came in place of those at ",
                                range->offset + range->have, " of range ", range->number));
  }
  std::byte* const data = range->data + range->have;
  QUERN_RETURN_IF_ERROR(ReadPayload(connection, data, frame.size));
  if (Xxh3Of(data, frame.size) != frame.xxh3) {
    return Garbled(absl::StrCat("bytes at ", frame.offset, " of ", range->path, " do not have the digest that came with them"));
  }
  range->have += frame.size;
  if (range->have < range->size) return absl::OkStatus();
  std::function<void(absl::Status)> done = std::move(range->done);
  {
    MutexLock lock(&mutex_);
    ranges_.pop_front();
    --asked_;
  }
  done(absl::OkStatus());
  return absl::OkStatus();
}

void RangeClient::OnFailure(const absl::Status& status) {
  std::deque<Range> ranges;
  {
    MutexLock lock(&mutex_);
    failure_ = status;
    ranges.swap(ranges_);
    asked_ = 0;
  }
  for (Range& range : ranges) range.done(absl::IsCancelled(status) ? status : Annotate(status, absl::StrCat("fetch ", range.path)));
}

}  // namespace quern::worker
