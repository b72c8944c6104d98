// Exit statuses of `quern`, and how errors become them.
#ifndef QUERN_CLIENT_EXIT_CODE_H_
#define QUERN_CLIENT_EXIT_CODE_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/v1/jobs.pb.h"

namespace quern::client {

// Part of the command line's contract: do not renumber.
enum class ExitCode {
  kDone = 0,
  kFailed = 1,
  kUsage = 2,     // the command line itself is wrong; nothing was started
  kMismatch = 3,  // verification found a difference
};

// INVALID_ARGUMENT that ExitCodeOf takes for a mistake on the command line.
absl::Status UsageError(absl::string_view message);

// kDone for OK, kUsage for a UsageError, else kFailed: also for INVALID_ARGUMENT of a server, which speaks of the work and not of the
// flags.
ExitCode ExitCodeOf(const absl::Status& status);

// Of a job that has ended: mismatches come before everything else, then only SUCCEEDED is kDone.
ExitCode ExitCodeOf(const quern::v1::Job& job);

}  // namespace quern::client

#endif  // QUERN_CLIENT_EXIT_CODE_H_
