// The progress of a job: one live line on a terminal, a plain line every few seconds elsewhere.
#ifndef QUERN_CLIENT_PROGRESS_H_
#define QUERN_CLIENT_PROGRESS_H_

#include <cstdint>
#include <deque>
#include <ostream>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "quern/v1/jobs.pb.h"

namespace quern::client {

// Rate of a counter over the last seconds. Not thread-safe.
class RateMeter {
 public:
  explicit RateMeter(absl::Duration window) : window_(window) {}
  // `now` never goes back. A counter that goes back (an attempt that is done again) starts the measurement anew.
  void Add(absl::Duration now, uint64_t count);
  // Growth and time of the window; zero time before the second sample.
  uint64_t growth() const { return samples_.empty() ? 0 : samples_.back().count - samples_.front().count; }
  absl::Duration elapsed() const { return samples_.empty() ? absl::ZeroDuration() : samples_.back().time - samples_.front().time; }
  // Time until `remaining` more at this rate; infinite when it stands still or is not known yet.
  absl::Duration Eta(uint64_t remaining) const;

 private:
  struct Sample {
    absl::Duration time;
    uint64_t count;
  };
  const absl::Duration window_;
  std::deque<Sample> samples_;
};

// Not thread-safe. Writes to a stream that must outlive it.
class Progress {
 public:
  struct Options {
    bool terminal = false;
    int width = 80;  // of the terminal: a line never wraps
    absl::Duration live_interval = absl::Milliseconds(200);
    absl::Duration plain_interval = absl::Seconds(5);
  };

  Progress(std::ostream* out, Clock* clock, Options options) : out_(out), clock_(clock), options_(options) {}
  // Ends a live line.
  ~Progress() { Clear(); }

  // Takes the newest state and draws when it is time; a change of the job's state is drawn at once.
  void Update(const quern::v1::Job& job);
  // A line of its own, above the live line.
  void Message(absl::string_view text);
  // Removes the live line, before other output.
  void Clear();

  // The line for a job, for example "running  3/12 tasks  1.2 GiB of 3.4 GiB read  1.42 GB/s  ETA 0:08  SQNR 21.4 dB".
  std::string Line(const quern::v1::Job& job) const;

 private:
  std::ostream* const out_;
  Clock* const clock_;
  const Options options_;
  RateMeter rate_{absl::Seconds(10)};
  bool drawn_ = false;
  absl::Duration last_draw_;
  int last_state_ = -1;
  bool live_line_ = false;
  std::string last_line_;
};

// "running", "succeeded", ...
std::string StateName(quern::v1::Job::State state);

// The job needs nothing more to be done: SUCCEEDED, FAILED or CANCELLED.
bool HasEnded(const quern::v1::Job& job);

}  // namespace quern::client

#endif  // QUERN_CLIENT_PROGRESS_H_
