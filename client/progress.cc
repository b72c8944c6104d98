#include "client/progress.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "client/human.h"

namespace quern::client {

using quern::v1::Job;

void RateMeter::Add(absl::Duration now, uint64_t count) {
  if (!samples_.empty() && count < samples_.back().count) samples_.clear();
  samples_.push_back({now, count});
  while (samples_.size() > 2 && samples_[1].time <= now - window_) samples_.pop_front();
}

absl::Duration RateMeter::Eta(uint64_t remaining) const {
  if (remaining == 0) return absl::ZeroDuration();
  if (growth() == 0 || elapsed() <= absl::ZeroDuration()) return absl::InfiniteDuration();
  return elapsed() * (static_cast<double>(remaining) / static_cast<double>(growth()));
}

namespace {

// Reading is what most operations wait for; one that reads nothing (a synthetic checkpoint) is measured by what it writes.
struct Measure {
  uint64_t done, total;
  const char* verb;
};

Measure MeasureOf(const quern::v1::Progress& progress) {
  if (progress.bytes_to_read() > 0) return {progress.bytes_read(), progress.bytes_to_read(), "read"};
  return {progress.bytes_written(), progress.bytes_to_write(), "written"};
}

}  // namespace

void Progress::Update(const Job& job) {
  const absl::Duration now = clock_->Monotonic();
  const Measure measure = MeasureOf(job.progress());
  if (job.state() == Job::RUNNING) rate_.Add(now, measure.done);

  const absl::Duration interval = options_.terminal ? options_.live_interval : options_.plain_interval;
  if (drawn_ && job.state() == last_state_ && now - last_draw_ < interval) return;
  std::string line = Line(job);
  // A plain log does not repeat what has not changed.
  if (!options_.terminal && drawn_ && line == last_line_) return;
  drawn_ = true;
  last_draw_ = now;
  last_state_ = job.state();
  last_line_ = line;
  if (options_.terminal) {
    if (options_.width > 1 && line.size() > static_cast<size_t>(options_.width - 1)) line.resize(options_.width - 1);
    *out_ << "\r" << line << "\x1b[K" << std::flush;
    live_line_ = true;
  } else {
    *out_ << line << "\n" << std::flush;
  }
}

void Progress::Message(absl::string_view text) {
  Clear();
  *out_ << std::string(text) << "\n" << std::flush;
}

void Progress::Clear() {
  if (live_line_) *out_ << "\r\x1b[K" << std::flush;
  live_line_ = false;
  drawn_ = false;
}

std::string Progress::Line(const Job& job) const {
  const quern::v1::Progress& progress = job.progress();
  // A verification that found something has succeeded as a job.
  const int found = job.mismatches_size();
  std::string line = found > 0 ? absl::StrCat(found, found == 1 ? " mismatch" : " mismatches") : StateName(job.state());
  if (progress.tasks_total() == 0) return line;
  absl::StrAppend(&line, "  ", progress.tasks_done(), "/", progress.tasks_total(), " tasks");
  if (progress.tasks_failed() > 0) absl::StrAppend(&line, " (", progress.tasks_failed(), " failed)");
  const Measure measure = MeasureOf(progress);
  if (measure.total > 0) {
    absl::StrAppend(&line, "  ", FormatByteSize(measure.done), " of ", FormatByteSize(measure.total), " ", measure.verb);
  }
  if (job.state() == Job::RUNNING) {
    absl::StrAppend(&line, "  ", FormatRate(rate_.growth(), rate_.elapsed()), "  ETA ",
                    FormatElapsed(rate_.Eta(measure.total > measure.done ? measure.total - measure.done : 0)));
  }
  if (progress.sum_squares() > 0) absl::StrAppend(&line, "  SQNR ", FormatSqnr(progress.sum_squares(), progress.sum_squared_error()));
  return line;
}

std::string StateName(Job::State state) {
  return state == Job::STATE_UNSPECIFIED ? "unknown" : absl::AsciiStrToLower(Job::State_Name(state));
}

bool HasEnded(const Job& job) { return job.state() == Job::SUCCEEDED || job.state() == Job::FAILED || job.state() == Job::CANCELLED; }

}  // namespace quern::client
