// The only file that knows RocksDB. Its errors become Status here.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "daemon/queue/group_commit.h"
#include "daemon/queue/job_store.h"
#include "daemon/queue/store_migration.h"
#include "rocksdb/cache.h"
#include "rocksdb/convenience.h"
#include "rocksdb/db.h"
#include "rocksdb/filter_policy.h"
#include "rocksdb/options.h"
#include "rocksdb/sst_partitioner.h"
#include "rocksdb/table.h"
#include "rocksdb/write_batch.h"

namespace quern::daemon {
namespace {

// A full disk must not keep the store from recording that the disk is full: this file is given up for that.
constexpr char kBallastName[] = "ballast";
constexpr size_t kBallastSize = 1 << 20;
// Opening replays the log and writes new files. RocksDB as Debian builds it aborts when it finds no space for them, so we look first.
constexpr uint64_t kSpaceToOpen = 4 * kMiB;
// What a write may take beside its records: blocks, the log's own framing.
constexpr uint64_t kSpaceBesideBatch = 128 * kKiB;
// Others (a worker that removes its unfinished shard) may free space in the meantime.
constexpr int kNoSpaceTries = 20;
constexpr absl::Duration kNoSpaceWait = absl::Milliseconds(250);

rocksdb::Slice ToSlice(absl::string_view text) { return rocksdb::Slice(text.data(), text.size()); }
absl::string_view ToView(const rocksdb::Slice& slice) { return absl::string_view(slice.data(), slice.size()); }

absl::Status ToStatus(const rocksdb::Status& status, const std::string& directory) {
  if (status.ok()) return absl::OkStatus();
  const std::string message = absl::StrCat("job store ", directory, ": ", status.ToString());
  if (status.IsNotFound()) return absl::NotFoundError(message);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(absl::StrCat("disk full: ", message));
  if (status.IsCorruption()) return absl::DataLossError(message);
  if (status.IsIOError() && absl::StrContains(message, "lock")) {
    return absl::UnavailableError(absl::StrCat("the job store ", directory, " is in use by another coordinator (", status.ToString(), ")"));
  }
  return absl::UnavailableError(message);
}

// The first key after all keys with `prefix`; empty when there is none.
std::string PrefixEnd(std::string prefix) {
  while (!prefix.empty() && static_cast<unsigned char>(prefix.back()) == 0xFF) prefix.pop_back();
  if (!prefix.empty()) prefix.back() = static_cast<char>(static_cast<unsigned char>(prefix.back()) + 1);
  return prefix;
}

// Small: the coordinator's whole memory is 200 MiB, and the store holds little that is read twice.
rocksdb::Options StoreOptions() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.paranoid_checks = true;
  // Writers do not wait for a disk that is slow to take a full buffer, nor for a compaction that is behind.
  options.write_buffer_size = 4 << 20;
  options.max_write_buffer_number = 4;
  options.level0_slowdown_writes_trigger = 40;
  options.level0_stop_writes_trigger = 80;
  options.max_total_wal_size = 16 << 20;
  options.avoid_flush_during_recovery = true;
  // Plans, which are most of the bytes and never change, sink to a level of their own, out of the way of what changes all the time: the
  // first level is small, and no file holds records of two kinds.
  options.max_bytes_for_level_base = 16 << 20;
  options.target_file_size_base = 8 << 20;
  options.sst_partitioner_factory = rocksdb::NewSstPartitionerFixedPrefixFactory(1);
  // New files reach the disk bit by bit, not all at once in front of the log's next sync.
  options.bytes_per_sync = 512 << 10;
  options.max_open_files = 256;
  options.max_background_jobs = 2;
  options.allow_mmap_reads = false;
  options.allow_mmap_writes = false;
  options.allow_fallocate = false;
  options.max_manifest_file_size = 4 << 20;
  options.info_log_level = rocksdb::InfoLogLevel::WARN_LEVEL;
  options.max_log_file_size = 1 << 20;
  options.keep_log_file_num = 2;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  // Plans are mostly names and padding.
  const std::vector<rocksdb::CompressionType> known = rocksdb::GetSupportedCompressions();
  const bool lz4 = std::find(known.begin(), known.end(), rocksdb::kLZ4Compression) != known.end();
  options.compression = lz4 ? rocksdb::kLZ4Compression : rocksdb::kNoCompression;
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(16 << 20);
  // The index of a large plan is larger than what one shard of the cache keeps, and would be read and decompressed for each record. It
  // takes some 50 bytes a task.
  table.cache_index_and_filter_blocks = false;
  // The newest files hold records of all kinds: without filters each of them would be looked into for the plan of one task.
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

class RocksDbJobStore : public JobStore {
 public:
  RocksDbJobStore(std::string directory, std::unique_ptr<rocksdb::DB> db, StoreMetrics* metrics)
      : directory_(std::move(directory)),
        db_(std::move(db)),
        committer_([this](std::vector<StoreWrite> writes) { return Commit(std::move(writes)); }, metrics) {}

  void Write(std::vector<StoreWrite> writes, std::function<void(absl::Status)> done) override {
    committer_.Write(std::move(writes), std::move(done));
  }

  absl::StatusOr<std::string> Get(absl::string_view key) override {
    std::string value;
    QUERN_RETURN_IF_ERROR(ToStatus(db_->Get(rocksdb::ReadOptions(), ToSlice(key), &value), directory_));
    return value;
  }

  absl::Status Scan(absl::string_view prefix, std::function<absl::Status(absl::string_view, absl::string_view)> visit) override {
    rocksdb::ReadOptions options;
    options.fill_cache = false;
    const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options));
    for (it->Seek(ToSlice(prefix)); it->Valid() && absl::StartsWith(ToView(it->key()), prefix); it->Next()) {
      QUERN_RETURN_IF_ERROR(visit(ToView(it->key()), ToView(it->value())));
    }
    return ToStatus(it->status(), directory_);
  }

 private:
  absl::Status Commit(std::vector<StoreWrite> writes) {
    rocksdb::WriteBatch batch;
    for (StoreWrite& write : writes) {
      rocksdb::Status status;
      switch (write.kind) {
        case StoreWrite::Kind::kPut:
          status = batch.Put(write.key, write.value);
          std::string().swap(write.value);  // the plan of a large job must not be in memory twice
          break;
        case StoreWrite::Kind::kDelete:
          status = batch.Delete(write.key);
          break;
        case StoreWrite::Kind::kDeletePrefix:
          status = batch.DeleteRange(write.key, PrefixEnd(write.key));
          break;
      }
      QUERN_RETURN_IF_ERROR(ToStatus(status, directory_));
    }
    QUERN_RETURN_IF_ERROR(MakeRoomFor(batch.GetDataSize()));
    rocksdb::WriteOptions options;
    options.sync = true;
    rocksdb::Status status = db_->Write(options, &batch);
    // Another process may have taken the space since. RocksDB recovers by itself too and is busy meanwhile. Putting the same records twice
    // is harmless, so a batch that may have been written in part is written again.
    for (int i = 0; (status.IsNoSpace() || status.IsBusy()) && i < kNoSpaceTries; ++i) {
      QUERN_RETURN_IF_ERROR(RemoveFile(JoinPath(directory_, kBallastName)));
      if (i > 0) absl::SleepFor(kNoSpaceWait);
      status = db_->Resume();
      if (status.ok()) status = db_->Write(options, &batch);
    }
    return ToStatus(status, directory_);
  }

  // A write that finds no space puts RocksDB into an error state that is hard to leave, so the space is looked for first.
  absl::Status MakeRoomFor(uint64_t bytes) {
    const uint64_t needed = bytes + kSpaceBesideBatch;
    uint64_t free_bytes = 0;
    for (int i = 0; i < kNoSpaceTries; ++i) {
      QUERN_ASSIGN_OR_RETURN(free_bytes, FreeDiskSpace(directory_));
      if (free_bytes >= needed) return absl::OkStatus();
      if (i == 0) {
        QUERN_RETURN_IF_ERROR(RemoveFile(JoinPath(directory_, kBallastName)));
      } else {
        absl::SleepFor(kNoSpaceWait);
      }
    }
    return absl::ResourceExhaustedError(absl::StrCat("disk full: the job store ", directory_, " needs ", FormatByteSize(needed),
                                                     " of free space, there are ", FormatByteSize(free_bytes)));
  }

  const std::string directory_;
  const std::unique_ptr<rocksdb::DB> db_;
  GroupCommitter committer_;  // last: its thread uses the others until it is destroyed
};

}  // namespace

absl::StatusOr<std::unique_ptr<JobStore>> OpenRocksDbJobStore(const std::string& directory, StoreMetrics* metrics) {
  QUERN_RETURN_IF_ERROR(MakeDirectories(directory, 0700));
  QUERN_ASSIGN_OR_RETURN(const uint64_t free_bytes, FreeDiskSpace(directory));
  if (free_bytes < kSpaceToOpen) {
    return absl::ResourceExhaustedError(absl::StrCat("disk full: the job store ", directory, " needs ", FormatByteSize(kSpaceToOpen),
                                                     " of free space to start, there are ", FormatByteSize(free_bytes)));
  }
  const rocksdb::Options options = StoreOptions();
  rocksdb::DB* db = nullptr;
  QUERN_RETURN_IF_ERROR(ToStatus(rocksdb::DB::Open(options, directory, &db), directory));
  auto store = std::make_unique<RocksDbJobStore>(directory, std::unique_ptr<rocksdb::DB>(db), metrics);
  QUERN_RETURN_IF_ERROR(PrepareStore(store.get(), directory));
  const std::string ballast = JoinPath(directory, kBallastName);
  if (!FileExists(ballast)) QUERN_RETURN_IF_ERROR(WriteFileDurably(ballast, std::string(kBallastSize, '\0')));
  QUERN_RETURN_IF_ERROR(SyncDirectory(DirName(directory)));
  return store;
}

}  // namespace quern::daemon
