#include "daemon/rpc/run_json.h"

#include <map>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/digest.h"
#include "base/file.h"
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
                                        {"purpose", attempt.purpose() == quern::v1::AUDIT       ? "audit"
                                                    : attempt.purpose() == quern::v1::STRAGGLER ? "straggler"
                                                                                                : "work"},
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
  Json inputs = Json::array();
  for (const quern::v1::SourceFile& file : plan.input_files()) {
    inputs.push_back({{"path", file.path()}, {"size", file.size()}, {"content_sha256", HexDigest(file.content_sha256())}});
  }
  Json run = {{"identity", HexDigest(plan.identity())},
              {"job", JobName(job.id())},
              {"created", FormatNanos(job.create_time_ns())},
              {"recipe", plan.resolved_recipe()},
              {"max_shard_size", plan.max_shard_size()},
              {"numerics_version", plan.numerics_version()},
              {"sources", std::move(sources)},
              {"inputs", std::move(inputs)},
              {"grants", Json::array()},
              {"commits", Json::array()}};
  for (auto& [sequence, grant] : grants) run["grants"].push_back(std::move(grant));
  for (auto& [sequence, commit] : commits) run["commits"].push_back(std::move(commit));
  // Names of hosts and workers may be any bytes.
  return run.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::StatusOr<quern::v1::PlanSummary> ParseRunJson(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path));
  const absl::Status unreadable = absl::DataLossError(absl::StrCat(path, " is not what a finished job writes"));
  quern::v1::PlanSummary plan;
  try {
    const Json run = Json::parse(text);
    const auto raw = [](const Json& object, const char* key) { return absl::HexStringToBytes(object.value(key, "")); };
    plan.set_identity(raw(run, "identity"));
    plan.set_resolved_recipe(run.at("recipe").get<std::string>());
    plan.set_max_shard_size(run.at("max_shard_size").get<uint64_t>());
    plan.set_numerics_version(run.at("numerics_version").get<uint64_t>());
    for (const Json& source : run.at("sources")) {
      quern::v1::SourceFile& file = *plan.add_source_files();
      file.set_path(source.at("path").get<std::string>());
      file.set_size(source.at("size").get<uint64_t>());
      file.set_mtime_ns(source.at("mtime_ns").get<int64_t>());
      file.set_inode(source.at("inode").get<uint64_t>());
      file.set_header_sha256(raw(source, "header_sha256"));
      file.set_sample_digest(raw(source, "sample_digest"));
      file.set_blob(source.value("blob", ""));
      file.set_content_sha256(raw(source, "content_sha256"));
    }
  } catch (const Json::exception&) {
    return unreadable;
  }
  return plan;
}

}  // namespace quern::daemon
