#include "daemon/rpc/data_streams.h"

#include <fcntl.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/data_plane.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

using quern::v1::Chunk;
using quern::v1::ReadResultRequest;
using quern::v1::ReadResultResponse;
using quern::v1::ReadSourceRequest;
using quern::v1::ReadSourceResponse;
using quern::v1::WriteShardRequest;
using quern::v1::WriteShardResponse;

absl::Status ClientIsGone() { return absl::CancelledError("the client is gone"); }

// Ranges that one stream may have asked for: what comes beyond is read when there is room.
constexpr size_t kMostRanges = 8192;
constexpr int kMostChunks = 512;  // of a message

// How a stream ends and is forgotten. At most one thing of it is under way in each of three: a read, a write, work on files. `Reactor` is
// one of gRPC's server reactors.
template <class Reactor>
class StreamBase : public Reactor, public DataStream {
 public:
  void Stop(const absl::Status& status) override {
    MutexLock lock(&mutex_);
    if (stop_.ok()) stop_ = status;
    Advance();
  }
  void OnCancel() override { Stop(ClientIsGone()); }
  void OnWriteDone(bool ok) override {
    stalled_.Ended();
    MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok && stop_.ok()) stop_ = ClientIsGone();
    Advance();
  }
  void OnDone() override {
    service_->Remove(this);
    // Whoever finished the call may still hold it.
    { MutexLock lock(&mutex_); }
    delete this;
  }

 protected:
  StreamBase(DataService* service, grpc::CallbackServerContext* context)
      : service_(service), stalled_(service->stalled_writes(), context) {}

  // Starts what can be started. Called after every change.
  virtual void Next() QUERN_REQUIRES(mutex_) = 0;
  void Advance() QUERN_REQUIRES(mutex_) {
    if (finished_) return;
    if (!stop_.ok()) {
      if (!working_ && !writing_) End();
      return;
    }
    Next();
  }
  // Runs `work` on a thread for files; its error ends the stream.
  void Work(std::function<absl::Status()> work) QUERN_REQUIRES(mutex_) {
    working_ = true;
    service_->Schedule([this, work = std::move(work)] {
      const absl::Status status = work();
      MutexLock lock(&mutex_);
      working_ = false;
      if (stop_.ok()) stop_ = status;
      Advance();
    });
  }
  // One at a time: not while writing_. `message` stays as it is until then.
  template <class Message>
  void Write(const Message& message) QUERN_REQUIRES(mutex_) {
    writing_ = true;
    stalled_.Began();
    Reactor::StartWrite(&message);
  }
  void End() QUERN_REQUIRES(mutex_) {
    finished_ = true;
    Reactor::Finish(ToGrpcStatus(stop_));
  }

  DataService* const service_;
  StalledWrites::Stream stalled_;
  Mutex mutex_;
  bool working_ QUERN_GUARDED_BY(mutex_) = false;
  bool writing_ QUERN_GUARDED_BY(mutex_) = false;
  absl::Status stop_ QUERN_GUARDED_BY(mutex_);

 private:
  bool finished_ QUERN_GUARDED_BY(mutex_) = false;
};

class ReadSourceStream : public StreamBase<grpc::ServerBidiReactor<ReadSourceRequest, ReadSourceResponse>> {
 public:
  ReadSourceStream(DataService* service, grpc::CallbackServerContext* context) : StreamBase(service, context) {
    MutexLock lock(&mutex_);
    Advance();
  }

  void OnReadDone(bool ok) override {
    MutexLock lock(&mutex_);
    reading_ = false;
    if (ok) {
      if (const absl::Status taken = TakeRequest(); !taken.ok() && stop_.ok()) stop_ = taken;
    } else {
      ended_ = true;
    }
    Advance();
  }

 private:
  struct Range {
    uint64_t number;
    std::shared_ptr<const std::string> path;
    uint64_t offset;
    uint64_t size;
  };

  absl::Status TakeRequest() QUERN_REQUIRES(mutex_) {
    if (!known_) {
      if (!request_.has_attempt()) return absl::InvalidArgumentError("the first message names no attempt");
      attempt_ = request_.attempt();
      known_ = true;
    }
    for (ReadSourceRequest::Range& range : *request_.mutable_ranges()) {
      if (!range.path().empty()) last_path_ = std::make_shared<const std::string>(std::move(*range.mutable_path()));
      if (last_path_ == nullptr || range.size() == 0) return absl::InvalidArgumentError("a range has no file, or no bytes");
      ranges_.push_back({range.number(), last_path_, range.offset(), range.size()});
    }
    return absl::OkStatus();
  }

  void Next() override QUERN_REQUIRES(mutex_) {
    if (full_ && !writing_) {
      full_ = false;
      sending_.Swap(&filling_);
      Write(sending_);
    }
    // The next message is made while one is written.
    if (!working_ && !full_ && !ranges_.empty()) {
      std::vector<Range> parts;
      for (uint64_t total = 0; total < kLargestChunk && !ranges_.empty() && static_cast<int>(parts.size()) < kMostChunks;) {
        Range& range = ranges_.front();
        const uint64_t size = std::min(range.size, kLargestChunk - total);
        parts.push_back({range.number, range.path, range.offset, size});
        total += size;
        range.offset += size;
        range.size -= size;
        if (range.size == 0) ranges_.pop_front();
      }
      Work([this, parts = std::move(parts)] { return FillMessage(parts); });
    }
    if (!reading_ && !ended_ && ranges_.size() < kMostRanges) {
      reading_ = true;
      StartRead(&request_);
    }
    if (ended_ && !working_ && !writing_ && !full_ && ranges_.empty()) End();
  }

  absl::Status FillMessage(const std::vector<Range>& parts) {
    UploadKey key;
    // Asked each time: an attempt that is fenced gets no more.
    QUERN_RETURN_IF_ERROR(service_->FindAttempt(attempt_, &key).status());
    if (!files_.has_value()) {
      QUERN_ASSIGN_OR_RETURN(SourceFiles files, service_->FilesOf(key));
      files_.emplace(std::move(files));
    }
    // What is there is written over: cleared, it would be filled with zeros first.
    while (filling_.chunks_size() > static_cast<int>(parts.size())) filling_.mutable_chunks()->RemoveLast();
    while (filling_.chunks_size() < static_cast<int>(parts.size())) filling_.add_chunks();
    for (size_t i = 0; i < parts.size(); ++i) {
      const Range& part = parts[i];
      Chunk& chunk = *filling_.mutable_chunks(static_cast<int>(i));
      chunk.set_range(part.number);
      chunk.set_offset(part.offset);
      std::string& data = *chunk.mutable_data();
      data.resize(part.size);
      QUERN_RETURN_IF_ERROR(files_->Read(*part.path, part.offset, part.size, data.data()));
      service_->bytes_sent().Add(part.size);
      chunk.set_xxh3(Xxh3Of(data.data(), data.size()));
    }
    MutexLock lock(&mutex_);
    full_ = true;
    return absl::OkStatus();
  }

  ReadSourceRequest request_;
  bool reading_ QUERN_GUARDED_BY(mutex_) = false;
  bool ended_ QUERN_GUARDED_BY(mutex_) = false;  // by the client
  bool known_ QUERN_GUARDED_BY(mutex_) = false;
  quern::v1::AttemptId attempt_;  // set before the first work
  std::shared_ptr<const std::string> last_path_ QUERN_GUARDED_BY(mutex_);
  std::deque<Range> ranges_ QUERN_GUARDED_BY(mutex_);
  std::optional<SourceFiles> files_;  // of the work under way
  ReadSourceResponse filling_;        // likewise, then of `full_`
  bool full_ QUERN_GUARDED_BY(mutex_) = false;
  ReadSourceResponse sending_;  // of the write under way
};

class WriteShardStream : public StreamBase<grpc::ServerBidiReactor<WriteShardRequest, WriteShardResponse>> {
 public:
  WriteShardStream(DataService* service, grpc::CallbackServerContext* context) : StreamBase(service, context) {
    MutexLock lock(&mutex_);
    Advance();
  }

  void OnReadDone(bool ok) override {
    MutexLock lock(&mutex_);
    reading_ = false;
    ended_ = !ok;
    // A message that came as the stream was stopped is not looked at any more.
    if (ok && stop_.ok()) {
      Work([this] { return Process(); });
    } else {
      Advance();
    }
  }

 private:
  void Next() override QUERN_REQUIRES(mutex_) {
    if (answer_.has_value() && !writing_) {
      sending_.set_durable(answer_->durable);
      sending_.set_finished(answer_->finished);
      answer_.reset();
      Write(sending_);
    }
    if (!reading_ && !working_ && !ended_) {
      reading_ = true;
      StartRead(&request_);
    }
    if (ended_ && !working_ && !writing_) End();
  }

  absl::Status Process() {
    if (request_.has_open() != (upload_ == nullptr))
      return absl::InvalidArgumentError("a stream begins with one message that opens the shard");
    if (request_.has_open()) attempt_ = request_.open().attempt();
    absl::StatusOr<JobQueue::LiveAttempt> attempt = service_->FindAttempt(attempt_, &key_);
    QUERN_RETURN_IF_ERROR(attempt.status());
    switch (request_.kind_case()) {
      case WriteShardRequest::kOpen:
        return Open(*attempt, request_.open());
      case WriteShardRequest::kChunk:
        return TakeChunk(request_.chunk());
      case WriteShardRequest::kFinish:
        QUERN_RETURN_IF_ERROR(upload_->Finish(turn_));
        service_->uploads()->Forget(key_);
        Tell(size_, /*finished=*/true);
        return absl::OkStatus();
      case WriteShardRequest::KIND_NOT_SET:
        break;
    }
    return absl::InvalidArgumentError("a message of a kind that this coordinator does not know");
  }

  absl::Status Open(const JobQueue::LiveAttempt& attempt, const WriteShardRequest::Open& open) {
    if (!attempt.sends_output) return absl::InvalidArgumentError("the attempt writes its file itself, or has none");
    QUERN_RETURN_IF_ERROR(service_->CheckUpload(key_, attempt.path, open.size()));
    upload_ = service_->uploads()->Find(key_, attempt.path);
    size_ = open.size();
    sync_every_ = std::max<uint64_t>(open.sync_every(), 1);
    uint64_t have = 0;
    QUERN_ASSIGN_OR_RETURN(turn_, upload_->Open(open.size(), open.durable(), &have));
    synced_ = written_ = have;
    Tell(have, /*finished=*/false);
    return absl::OkStatus();
  }

  absl::Status TakeChunk(const Chunk& chunk) {
    if (chunk.data().empty() || chunk.data().size() > kLargestChunk) {
      return absl::InvalidArgumentError(absl::StrCat("a chunk of ", chunk.data().size(), " bytes: 1 to ", kLargestChunk, " are taken"));
    }
    if (Xxh3Of(chunk.data().data(), chunk.data().size()) != chunk.xxh3()) {
      return absl::AbortedError(absl::StrCat("the bytes at ", chunk.offset(), " do not have the digest that came with them"));
    }
    QUERN_RETURN_IF_ERROR(upload_->Write(turn_, chunk.offset(), chunk.data()));
    service_->bytes_received().Add(chunk.data().size());
    written_ += chunk.data().size();
    if (written_ - synced_ < sync_every_ && written_ < size_) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(synced_, upload_->Sync(turn_));
    Tell(synced_, /*finished=*/false);
    return absl::OkStatus();
  }

  // A later answer takes the place of one that was not sent yet.
  void Tell(uint64_t durable, bool finished) {
    MutexLock lock(&mutex_);
    answer_ = Answer{durable, finished};
  }

  struct Answer {
    uint64_t durable;
    bool finished;
  };

  WriteShardRequest request_;
  bool reading_ QUERN_GUARDED_BY(mutex_) = false;
  bool ended_ QUERN_GUARDED_BY(mutex_) = false;  // by the client
  std::optional<Answer> answer_ QUERN_GUARDED_BY(mutex_);
  WriteShardResponse sending_;  // of the write under way
  // Of the work under way.
  quern::v1::AttemptId attempt_;
  UploadKey key_;
  std::shared_ptr<ShardUpload> upload_;
  uint64_t turn_ = 0;
  uint64_t size_ = 0;
  uint64_t sync_every_ = 0;
  uint64_t written_ = 0;
  uint64_t synced_ = 0;
};

class ReadResultStream : public StreamBase<grpc::ServerWriteReactor<ReadResultResponse>> {
 public:
  ReadResultStream(DataService* service, grpc::CallbackServerContext* context, const ReadResultRequest& request)
      : StreamBase(service, context), request_(request) {
    MutexLock lock(&mutex_);
    Advance();
  }

 private:
  void Next() override QUERN_REQUIRES(mutex_) {
    if (full_ && !writing_) {
      full_ = false;
      sending_.Swap(&filling_);
      Write(sending_);
    }
    if (!working_ && !full_ && !at_end_) Work([this] { return FillMessage(); });
    if (at_end_ && !working_ && !full_ && !writing_) End();
  }

  absl::Status OpenResult() {
    QUERN_ASSIGN_OR_RETURN(const auto result, service_->FindResult(request_.job()));
    const auto& files = result->list.files();
    const auto file = std::find_if(files.begin(), files.end(), [this](const auto& file) { return file.name() == request_.name(); });
    if (file == files.end()) return absl::NotFoundError(absl::StrCat(request_.job(), " has no file ", request_.name()));
    path_ = JoinPath(result->directory, file->name());
    QUERN_ASSIGN_OR_RETURN(fd_, OpenFile(path_, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
    posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);  // a hint: more is read ahead
    size_ = file->size();
    offset_ = request_.offset();
    if (offset_ > size_) return absl::OutOfRangeError(absl::StrCat(path_, " has ", size_, " bytes"));
    return absl::OkStatus();
  }

  absl::Status FillMessage() {
    if (!fd_) QUERN_RETURN_IF_ERROR(OpenResult());
    const uint64_t size = std::min(kLargestChunk, size_ - offset_);
    if (size > 0) {
      Chunk& chunk = *filling_.mutable_chunk();
      chunk.set_offset(offset_);
      std::string& data = *chunk.mutable_data();
      data.resize(size);
      QUERN_RETURN_IF_ERROR(ReadExactly(fd_.get(), offset_, data.data(), size, path_));
      service_->bytes_sent().Add(size);
      chunk.set_xxh3(Xxh3Of(data.data(), data.size()));
      offset_ += size;
    }
    MutexLock lock(&mutex_);
    full_ = size > 0;
    at_end_ = offset_ == size_;
    return absl::OkStatus();
  }

  const ReadResultRequest request_;
  // Of the work under way.
  UniqueFd fd_;
  std::string path_;
  uint64_t size_ = 0;
  uint64_t offset_ = 0;
  ReadResultResponse filling_;
  bool full_ QUERN_GUARDED_BY(mutex_) = false;
  bool at_end_ QUERN_GUARDED_BY(mutex_) = false;
  ReadResultResponse sending_;  // of the write under way
};

template <class Stream, class... Arguments>
Stream* New(DataService* service, const Arguments&... arguments) {
  auto* const stream = new Stream(service, arguments...);
  service->Add(stream);
  return stream;
}

}  // namespace

grpc::ServerBidiReactor<ReadSourceRequest, ReadSourceResponse>* NewReadSourceStream(DataService* service,
                                                                                    grpc::CallbackServerContext* context) {
  return New<ReadSourceStream>(service, context);
}

grpc::ServerBidiReactor<WriteShardRequest, WriteShardResponse>* NewWriteShardStream(DataService* service,
                                                                                    grpc::CallbackServerContext* context) {
  return New<WriteShardStream>(service, context);
}

grpc::ServerWriteReactor<ReadResultResponse>* NewReadResultStream(DataService* service, grpc::CallbackServerContext* context,
                                                                  const ReadResultRequest& request) {
  return New<ReadResultStream>(service, context, request);
}

}  // namespace quern::daemon
