#include "daemon/rpc/data_transfers.h"

#include <fcntl.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/direct_writer.h"
#include "base/file.h"
#include "base/link/frame.h"
#include "base/status_macros.h"

namespace quern::daemon {
namespace {

using Kind = LinkFrame::Kind;

// Bytes of a source that are read, digested and encrypted while the processor has them at hand.
constexpr uint64_t kSourceChunk = 256 * kKiB;
// Ranges that a connection may have asked for: what comes beyond is read when there is room.
constexpr size_t kMostRanges = 8192;
constexpr size_t kLongestPath = 4096;
// An attempt is fenced while its worker asks for nothing.
constexpr absl::Duration kFencePoll = absl::Seconds(5);

absl::Status NotExpected(Kind kind) {
  return absl::InvalidArgumentError(absl::StrCat("a frame of the kind ", static_cast<uint32_t>(kind), " does not belong here"));
}

struct Range {
  uint64_t number;
  const std::string* path;
  uint64_t offset;
  uint64_t size;
};

class SourceSender {
 public:
  SourceSender(DataService& service, const quern::v1::AttemptId& attempt, LinkConnection& connection)
      : service_(service), attempt_(attempt), connection_(connection) {}

  absl::Status Run() {
    while (true) {
      UploadKey key;
      QUERN_RETURN_IF_ERROR(service_.FindAttempt(attempt_, &key).status());
      if (!files_.has_value()) {
        QUERN_ASSIGN_OR_RETURN(SourceFiles files, service_.FilesOf(key));
        files_.emplace(std::move(files));
      }
      QUERN_RETURN_IF_ERROR(TakeRanges(kFencePoll));
      if (ranges_.empty() && ended_) return absl::OkStatus();
      if (ranges_.empty()) continue;
      QUERN_RETURN_IF_ERROR(FillBuffer());
      QUERN_RETURN_IF_ERROR(connection_.Write(buffer_.data(), filled_));
    }
  }

 private:
  // Those that have come. Waits, if there are none to answer.
  absl::Status TakeRanges(absl::Duration patience) {
    while (!ended_ && ranges_.size() < kMostRanges) {
      QUERN_ASSIGN_OR_RETURN(const bool there, connection_.Await(ranges_.empty() ? patience : absl::ZeroDuration()));
      if (!there) return absl::OkStatus();
      QUERN_ASSIGN_OR_RETURN(const std::optional<LinkFrame> frame, ReadFrameHead(connection_));
      ended_ = !frame.has_value();
      if (ended_) break;
      if (frame->kind != Kind::kRange) return NotExpected(frame->kind);
      if (frame->size > kLongestPath) return absl::InvalidArgumentError("the path of a file is too long");
      if (frame->size > 0) {
        std::string path(frame->size, '\0');
        QUERN_RETURN_IF_ERROR(ReadPayload(connection_, path.data(), path.size()));
        // Only such as the plan has are kept, each once.
        QUERN_RETURN_IF_ERROR(files_->CheckNamed(path));
        path_ = &*paths_.insert(std::move(path)).first;
      }
      if (path_ == nullptr || frame->length == 0) return absl::InvalidArgumentError("a range has no file, or no bytes");
      ranges_.push_back({frame->range, path_, frame->offset, frame->length});
    }
    return absl::OkStatus();
  }

  // As many whole frames as fit.
  absl::Status FillBuffer() {
    buffer_.resize(kSourceChunk + kFrameHeadSize);
    filled_ = 0;
    while (!ranges_.empty() && buffer_.size() - filled_ > kFrameHeadSize) {
      Range& range = ranges_.front();
      const uint64_t size = std::min<uint64_t>(range.size, buffer_.size() - filled_ - kFrameHeadSize);
      if (size < range.size && filled_ > 0) break;  // large ranges in large chunks
      char* const data = buffer_.data() + filled_ + kFrameHeadSize;
      QUERN_RETURN_IF_ERROR(files_->Read(*range.path, range.offset, size, data));
      service_.bytes_sent().Add(size);
      head_.clear();
      AppendFrameHead({.kind = Kind::kChunk,
                       .size = static_cast<uint32_t>(size),
                       .range = range.number,
                       .offset = range.offset,
                       .length = 0,
                       .xxh3 = Xxh3Of(data, size)},
                      &head_);
      std::copy(head_.begin(), head_.end(), buffer_.begin() + filled_);
      filled_ += kFrameHeadSize + size;
      range.offset += size;
      range.size -= size;
      if (range.size == 0) ranges_.pop_front();
    }
    return absl::OkStatus();
  }

  DataService& service_;
  const quern::v1::AttemptId& attempt_;
  LinkConnection& connection_;
  std::optional<SourceFiles> files_;
  std::set<std::string> paths_;
  const std::string* path_ = nullptr;  // of the last range
  std::deque<Range> ranges_;
  bool ended_ = false;  // by the worker
  std::string buffer_, head_;
  size_t filled_ = 0;
};

class ShardTaker {
 public:
  ShardTaker(DataService& service, const UploadTurn& turn, LinkConnection& connection)
      : service_(service), turn_(turn), connection_(connection), written_(turn.durable), synced_(turn.durable) {}

  absl::Status Run() {
    while (true) {
      UploadKey key;
      QUERN_RETURN_IF_ERROR(service_.FindAttempt(turn_.attempt, &key).status());
      QUERN_ASSIGN_OR_RETURN(const bool there, connection_.Await(kFencePoll));
      if (!there) continue;
      QUERN_ASSIGN_OR_RETURN(const std::optional<LinkFrame> frame, ReadFrameHead(connection_));
      if (!frame.has_value()) return absl::OkStatus();
      if (frame->kind == Kind::kFinish) {
        QUERN_RETURN_IF_ERROR(turn_.upload->Finish(turn_.turn));
        service_.uploads()->Forget(turn_.key);
        return Tell(Kind::kFinished, turn_.size);
      }
      if (frame->kind != Kind::kChunk) return NotExpected(frame->kind);
      if (data_ == nullptr) data_ = NewBlockBuffer(kLargestChunk);
      if (data_ == nullptr) return absl::ResourceExhaustedError("the coordinator has no memory for another shard");
      QUERN_RETURN_IF_ERROR(ReadPayload(connection_, data_.get(), frame->size));
      // What came while the attempt was fenced is not written.
      QUERN_RETURN_IF_ERROR(service_.FindAttempt(turn_.attempt, &key).status());
      QUERN_RETURN_IF_ERROR(TakeChunk(*frame));
    }
  }

 private:
  absl::Status TakeChunk(const LinkFrame& frame) {
    const absl::string_view data(data_.get(), frame.size);
    if (data.empty()) return absl::InvalidArgumentError("a chunk of no bytes");
    if (Xxh3Of(data.data(), data.size()) != frame.xxh3) {
      return absl::AbortedError(absl::StrCat("the bytes at ", frame.offset, " do not have the digest that came with them"));
    }
    QUERN_RETURN_IF_ERROR(turn_.upload->Write(turn_.turn, frame.offset, data));
    service_.bytes_received().Add(data.size());
    written_ += data.size();
    if (written_ - synced_ < turn_.sync_every && written_ < turn_.size) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(synced_, turn_.upload->Sync(turn_.turn));
    return Tell(Kind::kDurable, synced_);
  }

  absl::Status Tell(Kind kind, uint64_t durable) {
    std::string frame;
    AppendFrame({.kind = kind, .offset = durable}, "", &frame);
    return connection_.Write(frame.data(), frame.size());
  }

  DataService& service_;
  const UploadTurn& turn_;
  LinkConnection& connection_;
  uint64_t written_;
  uint64_t synced_;
  BlockBuffer data_;  // of one chunk
};

}  // namespace

absl::Status SendSource(DataService& service, const quern::v1::AttemptId& attempt, LinkConnection& connection) {
  return SourceSender(service, attempt, connection).Run();
}

absl::Status TakeShard(DataService& service, const UploadTurn& turn, LinkConnection& connection) {
  return ShardTaker(service, turn, connection).Run();
}

absl::Status SendResult(DataService& service, const std::string& path, uint64_t offset, uint64_t size, LinkConnection& connection) {
  QUERN_ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  posix_fadvise(fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);  // a hint: more is read ahead
  std::string data, head;
  while (offset < size) {
    data.resize(std::min<uint64_t>(kLargestChunk, size - offset));
    QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), offset, data.data(), data.size(), path));
    head.clear();
    AppendFrameHead({.kind = Kind::kChunk,
                     .size = static_cast<uint32_t>(data.size()),
                     .range = 0,
                     .offset = offset,
                     .length = 0,
                     .xxh3 = Xxh3Of(data.data(), data.size())},
                    &head);
    QUERN_RETURN_IF_ERROR(connection.Write(head.data(), head.size()));
    QUERN_RETURN_IF_ERROR(connection.Write(data.data(), data.size()));
    service.bytes_sent().Add(data.size());
    offset += data.size();
  }
  return absl::OkStatus();
}

}  // namespace quern::daemon
