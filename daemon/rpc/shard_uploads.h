// Shards that workers send: the files of their attempts while they grow. Whoever sends one may vanish and come back at any time.
#ifndef QUERN_DAEMON_RPC_SHARD_UPLOADS_H_
#define QUERN_DAEMON_RPC_SHARD_UPLOADS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/direct_writer.h"
#include "base/file.h"
#include "base/held_directory.h"
#include "base/mutex.h"

namespace quern::daemon {

struct UploadKey {
  uint64_t job = 0;
  uint32_t task = 0;
  uint32_t attempt = 0;
  bool operator<(const UploadKey& other) const { return std::tie(job, task, attempt) < std::tie(other.job, other.task, other.attempt); }
};

// One file. Thread-safe; all methods block. Each Open gives out a turn, and ends the one before: its methods are ABORTED from then on. So
// does an error of the file: what was not durable may be lost then, and the next Open goes on after the bytes that its sender knows to be.
class ShardUpload {
 public:
  explicit ShardUpload(std::string path) : path_(std::move(path)) {}

  // The file is made with O_CREAT|O_EXCL and its space allocated (RESOURCE_EXHAUSTED, "disk full"), or, when this process does not know it
  // yet and it is there, cut to the `durable` bytes that its sender was told of. DATA_LOSS when there are fewer. Fills `have` with the
  // durable bytes there are: the next byte to come.
  absl::StatusOr<uint64_t> Open(uint64_t size, uint64_t durable, uint64_t* have);
  // The next bytes; ABORTED when they are not.
  absl::Status Write(uint64_t turn, uint64_t offset, absl::string_view data);
  // The bytes that are durable now: all that were written.
  absl::StatusOr<uint64_t> Sync(uint64_t turn);
  // All bytes are there: makes them, and the file's name, durable.
  absl::Status Finish(uint64_t turn);

  uint64_t written();
  // Removes an unfinished file; every turn has ended.
  void Abandon();

 private:
  absl::Status CheckTurn(uint64_t turn) const QUERN_REQUIRES(mutex_);
  absl::Status OpenFileOnce(uint64_t size, uint64_t durable) QUERN_REQUIRES(mutex_);
  absl::Status Broken(absl::Status status) QUERN_REQUIRES(mutex_);

  const std::string path_;
  Mutex mutex_;
  std::optional<HeldDirectory> directory_ QUERN_GUARDED_BY(mutex_);  // where the file was opened
  UniqueFd fd_ QUERN_GUARDED_BY(mutex_);
  DirectWriter writer_ QUERN_GUARDED_BY(mutex_);  // of fd_
  bool made_ QUERN_GUARDED_BY(mutex_) = false;    // there is a file
  bool gone_ QUERN_GUARDED_BY(mutex_) = false;    // finished or abandoned
  uint64_t size_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t written_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t turn_ QUERN_GUARDED_BY(mutex_) = 0;
};

// Thread-safe.
class ShardUploads {
 public:
  // The upload of an attempt: the one under way, or a new one.
  std::shared_ptr<ShardUpload> Find(const UploadKey& key, const std::string& path);
  // It has finished.
  void Forget(const UploadKey& key);
  // Removes the files of attempts that `lives` says no to: nobody else knows that they are unfinished.
  void Sweep(const std::function<bool(const UploadKey&)>& lives);

 private:
  Mutex mutex_;
  std::map<UploadKey, std::shared_ptr<ShardUpload>> uploads_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_SHARD_UPLOADS_H_
