#include "daemon/rpc/run_json.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "daemon/queue/names.h"
#include "nlohmann/json.hpp"

namespace quern::daemon {
namespace {

using Json = nlohmann::ordered_json;

std::string FormatNanos(int64_t ns) { return absl::FormatTime(absl::RFC3339_full, absl::FromUnixNanos(ns), absl::UTCTimeZone()); }

uint32_t ReadKeyNumber(absl::string_view key, size_t offset) {
  uint32_t value = 0;
  for (char c : key.substr(offset, 4)) value = value << 8 | static_cast<unsigned char>(c);
  return value;
}

}  // namespace

absl::StatusOr<std::string> BuildRunJson(JobStore* store, const quern::store::JobRecord& job, const quern::v1::PlanSummary& plan) {
  std::map<uint64_t, Json> grants, commits;
  QUERN_RETURN_IF_ERROR(store->Scan(JobKey('a', job.id()), [&](absl::string_view key, absl::string_view value) {
    quern::store::AttemptRecord attempt;
    if (!attempt.ParseFromArray(value.data(), static_cast<int>(value.size()))) {
      return absl::DataLossError(absl::StrCat("job store: unreadable attempt of ", JobName(job.id())));
    }
    const uint32_t task = ReadKeyNumber(key, 9), number = ReadKeyNumber(key, 13);
    grants[attempt.grant_sequence()] = {{"seq", attempt.grant_sequence()},
                                        {"task", task},
                                        {"attempt", number},
                                        {"worker", attempt.worker()},
                                        {"host", attempt.host()},
                                        {"device", attempt.device()},
                                        {"memory", attempt.memory()},
                                        {"time", FormatNanos(attempt.grant_time_ns())}};
    if (attempt.commit_sequence() != 0) {
      commits[attempt.commit_sequence()] = {{"seq", attempt.commit_sequence()},
                                            {"task", task},
                                            {"attempt", number},
                                            {"worker", attempt.worker()},
                                            {"time", FormatNanos(attempt.end_time_ns())},
                                            {"seconds", attempt.times().wall_seconds()},
                                            {"peak_rss", attempt.peak_rss()}};
    }
    return absl::OkStatus();
  }));
  Json sources = Json::array();
  for (const quern::v1::SourceFile& file : plan.source_files()) {
    Json source = {{"path", file.path()},
                   {"size", file.size()},
                   {"mtime_ns", file.mtime_ns()},
                   {"inode", file.inode()},
                   {"header_sha256", HexDigest(file.header_sha256())},
                   {"sample_digest", HexDigest(file.sample_digest())}};
    if (!file.blob().empty()) source["blob"] = file.blob();
    if (!file.content_sha256().empty()) source["content_sha256"] = HexDigest(file.content_sha256());
    sources.push_back(std::move(source));
  }
  Json run = {{"identity", HexDigest(plan.identity())}, {"job", JobName(job.id())}, {"created", FormatNanos(job.create_time_ns())},
              {"sources", std::move(sources)},          {"grants", Json::array()},  {"commits", Json::array()}};
  for (auto& [sequence, grant] : grants) run["grants"].push_back(std::move(grant));
  for (auto& [sequence, commit] : commits) run["commits"].push_back(std::move(commit));
  // Names of hosts and workers may be any bytes.
  return run.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace quern::daemon
