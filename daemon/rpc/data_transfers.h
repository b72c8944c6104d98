// What data connections are for: each function carries one transfer over one, from its first frame to its end, and blocks on it.
#ifndef QUERN_DAEMON_RPC_DATA_TRANSFERS_H_
#define QUERN_DAEMON_RPC_DATA_TRANSFERS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/link/connection.h"
#include "daemon/rpc/data_service.h"
#include "daemon/rpc/shard_uploads.h"

namespace quern::daemon {

// Answers the ranges that a worker asks for, until it ends its side. An attempt that is fenced gets no more.
absl::Status SendSource(DataService& service, const quern::v1::AttemptId& attempt, LinkConnection& connection);

// The turn of an upload that a worker was given.
struct UploadTurn {
  quern::v1::AttemptId attempt;
  UploadKey key;
  std::shared_ptr<ShardUpload> upload;
  uint64_t turn = 0;
  uint64_t size = 0;        // of the finished file
  uint64_t durable = 0;     // bytes that are there
  uint64_t sync_every = 1;  // bytes
};

// Takes a shard, tells how much of it is durable, and that it is finished; or until the worker ends its side.
absl::Status TakeShard(DataService& service, const UploadTurn& turn, LinkConnection& connection);

// Sends bytes [offset, size) of a file.
absl::Status SendResult(DataService& service, const std::string& path, uint64_t offset, uint64_t size, LinkConnection& connection);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_DATA_TRANSFERS_H_
