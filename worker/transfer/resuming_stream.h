// A stream in both directions that is opened again whenever it breaks, for as long as there is something to carry.
#ifndef QUERN_WORKER_TRANSFER_RESUMING_STREAM_H_
#define QUERN_WORKER_TRANSFER_RESUMING_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/channel/await_connected.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "worker/transfer/link_status.h"

namespace quern::worker {

struct LinkOptions {
  // Between tries: doubled from the first to the longest, and the first again once something has come through.
  absl::Duration first_pause = absl::Milliseconds(100);
  absl::Duration longest_pause = absl::Seconds(5);
  absl::Duration give_up = absl::Minutes(10);  // without anything that came through
  absl::Duration connect = absl::Seconds(5);   // that a try waits for a connection
};

// The derived class says what is carried. Two threads, from the first Start on: one opens and reads, the other writes.
template <class Request, class Response>
class ResumingStream {
 public:
  using Connection = grpc::ClientReaderWriterInterface<Request, Response>;
  using Open = std::function<std::unique_ptr<Connection>(grpc::ClientContext*)>;

  ResumingStream(std::shared_ptr<grpc::Channel> channel, Open open, const LinkOptions& options)
      : channel_(std::move(channel)), open_(std::move(open)), options_(options) {}
  virtual ~ResumingStream() = default;
  ResumingStream(const ResumingStream&) = delete;
  ResumingStream& operator=(const ResumingStream&) = delete;

 protected:
  // A connection is needed.
  virtual bool HasWork() QUERN_REQUIRES(mutex_) = 0;
  // There is a new connection: what was sent over the last one and not answered has not arrived.
  virtual void OnOpen() QUERN_REQUIRES(mutex_) = 0;
  // The next message to write, apart from what Fill adds; false when there is none now. `request` is the one before.
  virtual bool Take(Request* request) QUERN_REQUIRES(mutex_) = 0;
  virtual void Fill(Request*) {}
  // An error breaks the connection; IsPassing says whether another one is tried.
  virtual absl::Status OnResponse(const Response& response) = 0;
  // Nothing is carried any more, for good: work there is and work to come ends with `status`. Called once, by the reading thread.
  virtual void OnFailure(const absl::Status& status) = 0;

  // There may be work, or something to Take.
  void Start() QUERN_REQUIRES(mutex_) {
    if (!reader_.joinable()) {
      reader_ = std::thread([this] { RunReader(); });
      writer_ = std::thread([this] { RunWriter(); });
    }
    changed_.SignalAll();
  }
  // OnFailure with CANCELLED follows soon, if Start has been called and nothing has failed yet.
  void CancelStream() {
    MutexLock lock(&mutex_);
    cancelled_ = true;
    if (context_ != nullptr) context_->TryCancel();
    changed_.SignalAll();
  }
  // Ends the threads, after an OnFailure if there was none. For the derived destructor.
  void Close() {
    CancelStream();
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      changed_.SignalAll();
    }
    if (reader_.joinable()) reader_.join();
    if (writer_.joinable()) writer_.join();
  }

  Mutex mutex_;
  CondVar changed_;

 private:
  // Whether to open a connection; false when the thread is to end.
  bool AwaitWork(grpc::ClientContext* context) {
    MutexLock lock(&mutex_);
    while (!cancelled_ && !closing_ && (failed_ || !HasWork())) changed_.Wait(&mutex_);
    if (cancelled_ || closing_) return false;
    context_ = context;
    return true;
  }

  bool IsWanted() {
    MutexLock lock(&mutex_);
    return !cancelled_ && !closing_;
  }

  // After a connection broke with `status`: the failure to end with, or OK when it is time to try again.
  absl::Status AwaitRetry(const absl::Status& status, absl::Duration pause) {
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

  void RunReader() {
    absl::Duration pause = options_.first_pause;
    while (true) {
      grpc::ClientContext context;
      if (!AwaitWork(&context)) break;
      AwaitConnected(*channel_, options_.connect, [this] { return IsWanted(); });
      const std::unique_ptr<Connection> connection = open_(&context);
      {
        MutexLock lock(&mutex_);
        connection_ = connection.get();
        write_failed_ = false;
        OnOpen();
        changed_.SignalAll();
      }
      absl::Status status;
      while (status.ok() && connection->Read(&response_)) {
        status = OnResponse(response_);
        if (!status.ok()) break;
        pause = options_.first_pause;
        MutexLock lock(&mutex_);
        failing_since_ = absl::InfiniteDuration();
      }
      if (!status.ok()) {
        context.TryCancel();
        while (connection->Read(&response_)) {
        }
      }
      {
        MutexLock lock(&mutex_);
        connection_ = nullptr;
        while (writing_) changed_.Wait(&mutex_);
      }
      const grpc::Status end = connection->Finish();
      if (status.ok()) status = end.ok() ? absl::UnavailableError("the coordinator ended the stream") : FromGrpc(end);
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

  void RunWriter() {
    Request request;
    while (true) {
      Connection* connection;
      {
        MutexLock lock(&mutex_);
        while (!closing_ && (connection_ == nullptr || write_failed_ || !Take(&request))) changed_.Wait(&mutex_);
        if (closing_) return;
        connection = connection_;
        writing_ = true;
      }
      Fill(&request);
      const bool written = connection->Write(request);
      MutexLock lock(&mutex_);
      writing_ = false;
      write_failed_ = !written;
      changed_.SignalAll();
    }
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const Open open_;
  const LinkOptions options_;
  Response response_;  // of the reading thread; its memory is used again
  bool closing_ QUERN_GUARDED_BY(mutex_) = false;
  bool cancelled_ QUERN_GUARDED_BY(mutex_) = false;
  bool failed_ QUERN_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ QUERN_GUARDED_BY(mutex_) = nullptr;
  Connection* connection_ QUERN_GUARDED_BY(mutex_) = nullptr;
  bool writing_ QUERN_GUARDED_BY(mutex_) = false;
  bool write_failed_ QUERN_GUARDED_BY(mutex_) = false;
  absl::Duration failing_since_ QUERN_GUARDED_BY(mutex_) = absl::InfiniteDuration();  // nothing has come through since
  std::thread reader_;
  std::thread writer_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_RESUMING_STREAM_H_
