// Follows a job to its end.
#ifndef QUERN_CLIENT_WATCH_JOB_H_
#define QUERN_CLIENT_WATCH_JOB_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "client/interrupt.h"
#include "client/private_farm.h"
#include "client/progress.h"
#include "quern/v1/jobs.grpc.pb.h"

namespace quern::client {

struct WatchOutcome {
  quern::v1::Job job;        // the newest state; ended unless `interrupted`
  bool interrupted = false;  // by Ctrl-C
  // Of this watch, not of earlier runs of the job; of the whole job when it had ended before.
  absl::Duration elapsed;
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
};

// Blocks until the job has ended. With a private `farm`, looks after its children, and at an interrupt lets the worker finish its shards
// before it returns. Without one (null), an interrupt only ends the watching, and a lost connection is tried again for a minute.
absl::StatusOr<WatchOutcome> WatchJob(quern::v1::Jobs::Stub& jobs, const quern::v1::Job& job, PrivateFarm* farm, Interrupt& interrupt,
                                      Progress& progress, Clock* clock);

}  // namespace quern::client

#endif  // QUERN_CLIENT_WATCH_JOB_H_
