// The data plane of the coordinator: sources and results out, shards in. Its calls are short; what they let in goes over data connections.
#ifndef QUERN_DAEMON_RPC_DATA_SERVICE_H_
#define QUERN_DAEMON_RPC_DATA_SERVICE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/link_server.h"
#include "daemon/rpc/shard_uploads.h"
#include "daemon/rpc/source_files.h"
#include "daemon/rpc/thread_pool.h"
#include "quern/v1/data.grpc.pb.h"

namespace quern::daemon {

class DataService : public quern::v1::Data::CallbackService {
 public:
  using PrincipalOf = std::function<std::string(grpc::ServerContextBase*)>;

  // `coordinator` and `links` outlive it. The latter's connections use it: they have ended before it is destroyed. `principal_of`: as
  // Guard::PrincipalOf. An attempt is its holder's: others get PERMISSION_DENIED.
  DataService(Coordinator* coordinator, LinkServer* links, PrincipalOf principal_of);
  // All calls have ended.
  ~DataService() override;

  grpc::ServerUnaryReactor* CheckSource(grpc::CallbackServerContext*, const quern::v1::CheckSourceRequest*,
                                        quern::v1::CheckSourceResponse*) override;
  grpc::ServerUnaryReactor* ReadSource(grpc::CallbackServerContext*, const quern::v1::ReadSourceRequest*,
                                       quern::v1::ReadSourceResponse*) override;
  grpc::ServerUnaryReactor* WriteShard(grpc::CallbackServerContext*, const quern::v1::WriteShardRequest*,
                                       quern::v1::WriteShardResponse*) override;
  grpc::ServerUnaryReactor* ListResult(grpc::CallbackServerContext*, const quern::v1::ListResultRequest*,
                                       quern::v1::ListResultResponse*) override;
  grpc::ServerUnaryReactor* ReadResult(grpc::CallbackServerContext*, const quern::v1::ReadResultRequest*,
                                       quern::v1::ReadResultResponse*) override;

  // For the transfers.

  // FAILED_PRECONDITION with the reason FENCED for an attempt that cannot commit any more.
  absl::StatusOr<JobQueue::LiveAttempt> FindAttempt(const quern::v1::AttemptId& id, UploadKey* key);
  // These block.
  absl::StatusOr<SourceFiles> FilesOf(const UploadKey& key);
  ShardUploads* uploads() { return &uploads_; }
  // Bytes of files that were sent, and that came; the same bytes may go twice over a link that breaks.
  Counter& bytes_sent() { return bytes_sent_; }
  Counter& bytes_received() { return bytes_received_; }

 private:
  struct Result {
    std::string directory;
    quern::v1::ListResultResponse list;
  };

  // Runs `call`, which may block on files, soon, and ends the call with its status.
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, std::function<absl::Status(const std::string& principal)> call);
  // FindAttempt, for its holder.
  absl::StatusOr<JobQueue::LiveAttempt> FindOwnAttempt(const quern::v1::AttemptId& id, const std::string& principal, UploadKey* key);
  // INVALID_ARGUMENT for another size than that of the task's plan; nothing is opened or allocated on the word of a worker.
  absl::Status CheckUpload(const UploadKey& key, const std::string& path, uint64_t size);
  absl::Status BeginUpload(const quern::v1::WriteShardRequest& request, const std::string& principal,
                           quern::v1::WriteShardResponse* response);
  absl::Status BeginResult(const quern::v1::ReadResultRequest& request, const std::string& principal,
                           quern::v1::ReadResultResponse* response);
  absl::StatusOr<Result> LoadResult(uint64_t job);
  absl::StatusOr<std::shared_ptr<const Result>> FindResult(const std::string& job);

  Coordinator* const coordinator_;
  LinkServer* const links_;
  const PrincipalOf principal_of_;
  Counter bytes_sent_, bytes_received_;
  ShardUploads uploads_;
  Mutex mutex_;
  // Of the jobs that were asked for last: a manifest may have many megabytes, and a client asks for each of its files.
  std::map<uint64_t, std::shared_ptr<const Result>> results_ QUERN_GUARDED_BY(mutex_);
  ThreadPool work_;
  std::unique_ptr<Ticker> sweeper_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_DATA_SERVICE_H_
