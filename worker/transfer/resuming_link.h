// A data connection that is made again whenever it breaks, for as long as there is something to carry.
#ifndef QUERN_WORKER_TRANSFER_RESUMING_LINK_H_
#define QUERN_WORKER_TRANSFER_RESUMING_LINK_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/link/connection.h"
#include "base/link/frame.h"
#include "base/mutex.h"
#include "worker/transfer/data_link.h"

namespace quern::worker {

struct LinkOptions {
  // Between tries: doubled from the first to the longest, and the first again once something has come through.
  absl::Duration first_pause = absl::Milliseconds(100);
  absl::Duration longest_pause = absl::Seconds(5);
  absl::Duration give_up = absl::Minutes(10);  // without anything that came through
  absl::Duration connect = absl::Seconds(5);   // that a try waits for a connection
};

// The derived class says what is carried. Two threads, from the first Start on: one connects and reads, the other writes.
class ResumingLink {
 public:
  ResumingLink(std::shared_ptr<DataLink> link, const LinkOptions& options) : link_(std::move(link)), options_(options) {}
  virtual ~ResumingLink() = default;
  ResumingLink(const ResumingLink&) = delete;
  ResumingLink& operator=(const ResumingLink&) = delete;

 protected:
  // A connection is needed.
  virtual bool HasWork() QUERN_REQUIRES(mutex_) = 0;
  // The coordinator owes something: its silence is that of a broken link.
  virtual bool AwaitsAnswer() QUERN_REQUIRES(mutex_) = 0;
  // Asks the coordinator for the ticket of the next connection. What was sent over the last one and not answered has not arrived. By the
  // reading thread, while nothing is written.
  virtual absl::StatusOr<std::string> AskForTicket(grpc::ClientContext* context) = 0;
  // The next frame to write, but for size and digest, and its payload; false when there is none now. The payload of a chunk stays where it
  // is until it is written, others are copied at once.
  virtual bool Take(LinkFrame* frame, absl::string_view* payload) QUERN_REQUIRES(mutex_) = 0;
  // Reads the payload. An error breaks the connection; IsPassing says whether another one is tried. By the reading thread.
  virtual absl::Status OnFrame(const LinkFrame& frame, LinkConnection& connection) = 0;
  // Nothing is carried any more, for good: work there is and work to come ends with `status`. Called once, by the reading thread.
  virtual void OnFailure(const absl::Status& status) = 0;

  // There may be work, or something to Take.
  void Start() QUERN_REQUIRES(mutex_);
  // OnFailure with CANCELLED follows soon, if Start has been called and nothing has failed yet.
  void CancelLink();
  // Ends the threads, after an OnFailure if there was none. For the derived destructor.
  void Close();

  const std::shared_ptr<DataLink> link_;
  const LinkOptions options_;
  Mutex mutex_;
  CondVar changed_;

 private:
  // Whether to connect; false when the thread is to end.
  bool AwaitWork(grpc::ClientContext* context);
  bool IsWanted();
  // Connects, and carries until the connection ends: why it did.
  absl::Status Carry(grpc::ClientContext* context, absl::Duration* pause);
  absl::Status ReadFrames(LinkConnection& connection, absl::Duration* pause);
  // After a connection broke with `status`: the failure to end with, or OK when it is time to try again.
  absl::Status AwaitRetry(const absl::Status& status, absl::Duration pause);
  void RunReader();
  void RunWriter();

  bool closing_ QUERN_GUARDED_BY(mutex_) = false;
  bool cancelled_ QUERN_GUARDED_BY(mutex_) = false;
  bool failed_ QUERN_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ QUERN_GUARDED_BY(mutex_) = nullptr;
  LinkConnection* connection_ QUERN_GUARDED_BY(mutex_) = nullptr;
  bool writing_ QUERN_GUARDED_BY(mutex_) = false;
  bool write_failed_ QUERN_GUARDED_BY(mutex_) = false;
  absl::Duration failing_since_ QUERN_GUARDED_BY(mutex_) = absl::InfiniteDuration();  // nothing has come through since
  std::thread reader_;
  std::thread writer_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_RESUMING_LINK_H_
