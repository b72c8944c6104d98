#include "worker/transfer/range_client.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/channel/await_connected.h"
#include "base/channel/deadline.h"
#include "base/data_plane.h"
#include "base/digest.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

using quern::v1::ReadSourceRequest;
using quern::v1::ReadSourceResponse;

// A message of requests stays small, whatever the pipeline has asked for.
constexpr size_t kMostRanges = 512;
// Long enough to digest a large header from a slow disk.
constexpr absl::Duration kCheckTimeout = absl::Seconds(30);
constexpr absl::Duration kStopPoll = absl::Milliseconds(50);

absl::Status Garbled(absl::string_view what) { return absl::UnavailableError(absl::StrCat("the coordinator's answer is garbled: ", what)); }

}  // namespace

RangeClient::RangeClient(std::shared_ptr<DataLink> link, const quern::v1::AttemptId& attempt, const std::atomic<bool>* stop,
                         const LinkOptions& options)
    : ResumingStream(
          link->channel, [link](grpc::ClientContext* context) { return link->stub->ReadSource(context); }, options),
      link_(std::move(link)),
      attempt_(attempt),
      stop_(stop),
      options_(options) {}

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

void RangeClient::OnOpen() {
  asked_ = 0;
  opened_ = false;
  last_path_.clear();
}

bool RangeClient::Take(ReadSourceRequest* request) {
  if (asked_ == ranges_.size()) return false;
  request->Clear();
  if (!opened_) *request->mutable_attempt() = attempt_;
  opened_ = true;
  for (; asked_ < ranges_.size() && request->ranges_size() < static_cast<int>(kMostRanges); ++asked_) {
    const Range& range = ranges_[asked_];
    ReadSourceRequest::Range& asked = *request->add_ranges();
    asked.set_number(range.number);
    if (range.path != last_path_) asked.set_path(range.path);
    last_path_ = range.path;
    asked.set_offset(range.offset + range.have);
    asked.set_size(range.size - range.have);
  }
  return true;
}

absl::Status RangeClient::OnResponse(const ReadSourceResponse& response) {
  for (const quern::v1::Chunk& chunk : response.chunks()) QUERN_RETURN_IF_ERROR(OnChunk(chunk));
  return absl::OkStatus();
}

absl::Status RangeClient::OnChunk(const quern::v1::Chunk& chunk) {
  Range* range;
  {
    MutexLock lock(&mutex_);
    if (ranges_.empty() || asked_ == 0) return Garbled("nothing was asked for");
    range = &ranges_.front();
  }
  const std::string& data = chunk.data();
  if (chunk.range() != range->number || chunk.offset() != range->offset + range->have || data.empty() ||
      data.size() > range->size - range->have) {
    return Garbled(absl::StrCat("bytes at ", chunk.offset(), " of range ", chunk.range(), " came in place of those at ",
                                range->offset + range->have, " of range ", range->number));
  }
  if (Xxh3Of(data.data(), data.size()) != chunk.xxh3()) {
    return Garbled(absl::StrCat("bytes at ", chunk.offset(), " of ", range->path, " do not have the digest that came with them"));
  }
  memcpy(range->data + range->have, data.data(), data.size());
  range->have += data.size();
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
