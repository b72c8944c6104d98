// Writes one file from its first byte to its last through the output window of the buffer pool.
//
// Bytes are reserved in order, filled in place in any order by any thread, and then move on by themselves: one thread hashes them, another
// writes whole chunks (O_DIRECT through io_uring, or buffered) or hands them to a sink. The window's bytes are free again once both are
// done with them.
#ifndef QUERN_WORKER_IO_OUTPUT_FILE_H_
#define QUERN_WORKER_IO_OUTPUT_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/held_directory.h"
#include "base/mutex.h"
#include "worker/io/buffer_pool.h"
#include "worker/io/output_sink.h"
#include "worker/io/uring.h"

namespace quern::worker {

class OutputFile {
 public:
  struct Options {
    std::string path;
    uint64_t size = 0;                               // of the finished file
    const BufferPool* pool = nullptr;                // outlives the file
    Uring* uring = nullptr;                          // null: buffered writes. Outlives the file
    OutputSink* sink = nullptr;                      // takes the place of a file at `path`. Outlives this
    std::atomic<uint64_t>* bytes_written = nullptr;  // counts; null: nobody asks
    std::function<void(absl::Status)> on_error;      // called from any thread, also more than once
  };
  struct Times {
    double write_seconds = 0;  // with at least one write under way
    double hash_seconds = 0;
    double stall_seconds = 0;  // the writing thread had nothing to write
  };

  // Creates the file (ALREADY_EXISTS if it is there) in the directory that its path leads to now, also if it leads elsewhere later, and
  // allocates its blocks, so that a full disk is found now: RESOURCE_EXHAUSTED with
  // "disk full". Filesystems that cannot allocate ahead find it later.
  static absl::StatusOr<std::unique_ptr<OutputFile>> Create(Options options);
  // Ends the threads; removes the file unless Finish has succeeded.
  ~OutputFile();

  // The next `size` bytes of the file; false when the window had no room within `timeout`. By one thread. `size` is at most MaxReserve().
  bool Reserve(uint64_t size, absl::Duration timeout);
  uint64_t MaxReserve() const { return layout_.output - layout_.chunk; }
  uint64_t reserved() const { return reserved_; }  // by the reserving thread

  // Where a reserved byte that is not complete stands. Up to PoolLayout::window bytes behind it are contiguous.
  std::byte* At(uint64_t offset) const { return ring_ + offset % layout_.output; }
  // The reserved bytes hold what the file shall have. Each byte once; thread-safe.
  void Complete(uint64_t offset, uint64_t size);

  // Whether every byte of the file is complete, hashed and written; waits for that up to `timeout`.
  bool Drained(absl::Duration timeout);
  // After Drained: cuts the padding off, fsyncs file and directory, closes; or finishes the sink. Returns the SHA-256 of the file.
  absl::StatusOr<std::string> Finish();

  Times times() const;
  bool direct() const { return direct_; }

 private:
  explicit OutputFile(Options options);
  absl::Status Open();
  void WriteLoop();
  void HashLoop();
  // Bytes up to here may be written: whole chunks, and all once everything is complete.
  uint64_t Writable() const QUERN_REQUIRES(mutex_);
  // Writes one chunk; buffered ones at once.
  void StartWrite(uint64_t offset, uint64_t size);
  void ContinueDirect(uint64_t offset, uint64_t size, uint64_t done);
  void WriteBuffered(uint64_t offset, uint64_t size);
  void Written(uint64_t offset, uint64_t size);
  void Failed(const absl::Status& status);

  const Options options_;
  const PoolLayout layout_;
  std::byte* const ring_;
  std::optional<HeldDirectory> directory_;
  UniqueFd fd_;
  UniqueFd direct_fd_;
  std::atomic<bool> direct_{false};
  bool created_ = false;
  bool finished_ = false;
  uint64_t reserved_ = 0;

  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t complete_ QUERN_GUARDED_BY(mutex_) = 0;                        // all bytes below are complete
  std::map<uint64_t, uint64_t> complete_ahead_ QUERN_GUARDED_BY(mutex_);  // [key, value): complete, but not all below
  uint64_t hashed_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t submitted_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t written_ QUERN_GUARDED_BY(mutex_) = 0;  // all bytes below are written
  std::map<uint64_t, uint64_t> written_ahead_ QUERN_GUARDED_BY(mutex_);
  int in_flight_ QUERN_GUARDED_BY(mutex_) = 0;
  bool stop_ QUERN_GUARDED_BY(mutex_) = false;
  bool failed_ QUERN_GUARDED_BY(mutex_) = false;
  Times times_ QUERN_GUARDED_BY(mutex_);
  absl::Duration write_began_ QUERN_GUARDED_BY(mutex_);
  Sha256 sha_;  // of the hashing thread, then of Finish
  std::thread writer_;
  std::thread hasher_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_IO_OUTPUT_FILE_H_
