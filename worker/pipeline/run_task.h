// Runs one task from start to end: the streaming pipeline read -> compute -> write within a fixed budget.
#ifndef QUERN_WORKER_PIPELINE_RUN_TASK_H_
#define QUERN_WORKER_PIPELINE_RUN_TASK_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/path_map.h"
#include "quern/v1/plan.pb.h"
#include "quern/v1/workers.pb.h"
#include "worker/io/output_sink.h"
#include "worker/io/range_fetcher.h"
#include "worker/io/source_reader.h"  // ReaderMode, ParseReaderMode

namespace quern::worker {

struct TaskOptions {
  uint64_t memory = 0;  // bytes of the buffer pool, at least kMinimumTaskMemory: everything that grows with the data comes out of it
  int threads = 1;      // of the compute stage
  ReaderMode reader = ReaderMode::kAuto;
  std::string output_path;  // opened with O_CREAT|O_EXCL; empty for tasks without output, and with a sink
  // Above output_path: below it no link is followed, so that whoever may make some there does not choose what is written and removed.
  std::string output_root = "/";

  // For workers on other machines than the coordinator. Pointers may be null and outlive the task.
  PathMap paths;                    // where the files that the plan names are here
  RangeFetcher* fetcher = nullptr;  // fetches files that are not here
  bool fetch_source = false;        // fetches all, and looks at none here
  OutputSink* sink = nullptr;       // takes the output
  std::string spool;                // with a sink: a directory here, for side tensors that do not fit the pool
};

// Shared with the thread that watches the task.
struct TaskControl {
  std::atomic<bool> stop{false};  // set to end the task with CANCELLED; its partial file is removed
  std::atomic<uint64_t> bytes_read{0};
  std::atomic<uint64_t> bytes_written{0};
};

// Blocks. On OK the output file is complete, fsynced, and so is its directory. On an error the partial file is removed, and
// FailureOf(status) tells the reason. A source file is the one that was planned if size, header, modification time and inode are the same;
// one where only the latter two differ, as a copy on this machine would, if its samples have the planned digest. Where the plan has a digest
// of the whole content (--verify-source), such a file, and any that `paths` leads to, is read as a whole and must have that.
absl::StatusOr<quern::v1::TaskResult> RunTask(const quern::v1::TaskSpec& spec, const TaskOptions& options, TaskControl* control);

// The failure that a status of RunTask stands for: reason from a payload set where the error arose, else from the code (RESOURCE_EXHAUSTED
// with "disk full" is DISK_FULL, DATA_LOSS is IO_ERROR, INVALID_ARGUMENT is BAD_INPUT, ...).
quern::v1::Failure FailureOf(const absl::Status& status);
absl::Status WithFailure(absl::Status status, quern::v1::FailureReason reason, uint64_t bytes_needed = 0);

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_RUN_TASK_H_
