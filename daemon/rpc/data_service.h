// The data plane of the coordinator: sources and results out, shards in. Files are read and written by a few threads of its own, one
// message of a stream at a time: a stream that its peer does not keep up with holds memory for one message, and no thread.
#ifndef QUERN_DAEMON_RPC_DATA_SERVICE_H_
#define QUERN_DAEMON_RPC_DATA_SERVICE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/services.h"
#include "daemon/rpc/shard_uploads.h"
#include "daemon/rpc/source_files.h"
#include "daemon/rpc/stalled_writes.h"
#include "daemon/rpc/thread_pool.h"
#include "quern/v1/data.grpc.pb.h"

namespace quern::daemon {

// A call that may last: the service can end it.
class DataStream {
 public:
  virtual ~DataStream() = default;
  // The call ends with `status` as soon as nothing of it is under way.
  virtual void Stop(const absl::Status& status) = 0;
};

class DataService : public quern::v1::Data::CallbackService {
 public:
  explicit DataService(Coordinator* coordinator, StreamLimits limits = {});
  // All calls have ended.
  ~DataService() override;

  // Ends all streams with UNAVAILABLE, and those to come.
  void Shutdown();

  grpc::ServerUnaryReactor* CheckSource(grpc::CallbackServerContext*, const quern::v1::CheckSourceRequest*,
                                        quern::v1::CheckSourceResponse*) override;
  grpc::ServerBidiReactor<quern::v1::ReadSourceRequest, quern::v1::ReadSourceResponse>* ReadSource(grpc::CallbackServerContext*) override;
  grpc::ServerBidiReactor<quern::v1::WriteShardRequest, quern::v1::WriteShardResponse>* WriteShard(grpc::CallbackServerContext*) override;
  grpc::ServerUnaryReactor* ListResult(grpc::CallbackServerContext*, const quern::v1::ListResultRequest*,
                                       quern::v1::ListResultResponse*) override;
  grpc::ServerWriteReactor<quern::v1::ReadResultResponse>* ReadResult(grpc::CallbackServerContext*,
                                                                      const quern::v1::ReadResultRequest*) override;

  // For the calls.

  // Runs `work`, which may block on files, soon.
  void Schedule(std::function<void()> work) { work_.Schedule(std::move(work)); }
  // FAILED_PRECONDITION with the reason FENCED for an attempt that cannot commit any more.
  absl::StatusOr<JobQueue::LiveAttempt> FindAttempt(const quern::v1::AttemptId& id, UploadKey* key);
  // These block.
  absl::StatusOr<SourceFiles> FilesOf(const UploadKey& key);
  // INVALID_ARGUMENT for another size than that of the task's plan; nothing is opened or allocated on the word of a worker.
  absl::Status CheckUpload(const UploadKey& key, const std::string& path, uint64_t size);
  struct Result {
    std::string directory;
    quern::v1::ListResultResponse list;
  };
  absl::StatusOr<std::shared_ptr<const Result>> FindResult(const std::string& job);
  ShardUploads* uploads() { return &uploads_; }
  StalledWrites* stalled_writes() { return &stalled_writes_; }
  // Streams that Shutdown ends; one that comes after it, or that is one too many, is stopped at once.
  void Add(DataStream* stream);
  void Remove(DataStream* stream);
  // Bytes of files that were sent, and that came; the same bytes may go twice over a link that breaks.
  Counter& bytes_sent() { return bytes_sent_; }
  Counter& bytes_received() { return bytes_received_; }
  size_t OpenStreams();

 private:
  absl::StatusOr<Result> LoadResult(uint64_t job);

  Coordinator* const coordinator_;
  Counter bytes_sent_, bytes_received_;
  ShardUploads uploads_;
  StalledWrites stalled_writes_;
  Mutex mutex_;
  std::set<DataStream*> streams_ QUERN_GUARDED_BY(mutex_);
  bool shut_down_ QUERN_GUARDED_BY(mutex_) = false;
  // Of the jobs that were asked for last: a manifest may have many megabytes, and a client asks for each of its files.
  std::map<uint64_t, std::shared_ptr<const Result>> results_ QUERN_GUARDED_BY(mutex_);
  ThreadPool work_;
  std::unique_ptr<Ticker> sweeper_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_DATA_SERVICE_H_
