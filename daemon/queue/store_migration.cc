#include "daemon/queue/store_migration.h"

#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "daemon/queue/names.h"
#include "quern/store/store.pb.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {
namespace {

constexpr char kVersionKey[] = "v";

StoreWrite VersionWrite() {
  quern::store::StoreVersion version;
  version.set_version(kStoreVersion);
  version.set_written_by("quernd");
  return {StoreWrite::Kind::kPut, kVersionKey, version.SerializeAsString()};
}

using quern::store::AttemptRecord;
using quern::store::JobRecord;
using quern::store::TaskRecord;

template <class Record>
absl::StatusOr<std::vector<Record>> ReadRecords(JobStore* store, const std::string& name, const std::string& prefix) {
  std::vector<Record> records;
  QUERN_RETURN_IF_ERROR(store->Scan(prefix, [&](absl::string_view, absl::string_view value) {
    if (records.emplace_back().ParseFromArray(value.data(), static_cast<int>(value.size()))) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("job store ", name, ": unreadable ", Record::descriptor()->name(), " in ", prefix.substr(0, 1)));
  }));
  return records;
}

// Version 1 has the numerics version of a job only in its plan.
absl::Status AddNumericsVersion(JobStore* store, const std::string& name, JobRecord* job) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, store->Get(JobKey('p', job->id())));
  quern::v1::PlanSummary plan;
  if (!plan.ParseFromString(text)) return absl::DataLossError(absl::StrCat("job store ", name, ": unreadable plan of jobs/", job->id()));
  job->set_numerics_version(plan.numerics_version());
  return absl::OkStatus();
}

bool IsAudit(const AttemptRecord& attempt) { return attempt.purpose() == quern::v1::AUDIT; }

// Version 2 has only the attempts to say who audited a task, and who may have come to other bytes.
absl::Status AddWhoAudited(JobStore* store, const std::string& name, JobRecord* job, std::vector<StoreWrite>* writes) {
  QUERN_ASSIGN_OR_RETURN(std::vector<TaskRecord> tasks, ReadRecords<TaskRecord>(store, name, JobKey('t', job->id())));
  for (uint32_t i = 0; i < tasks.size(); ++i) {
    const bool mismatch = job->error().reason() == "DATA_LOSS" && job->error().task() == TaskName(job->id(), i);
    if (!mismatch && tasks[i].audit() != TaskRecord::PASSED) continue;
    QUERN_ASSIGN_OR_RETURN(const std::vector<AttemptRecord> attempts, ReadRecords<AttemptRecord>(store, name, TaskKey('a', job->id(), i)));
    std::string committer;
    for (const AttemptRecord& attempt : attempts) {
      if (attempt.state() != quern::v1::Attempt::COMMITTED) continue;
      if (IsAudit(attempt)) {
        tasks[i].set_audited_by(attempt.worker());
      } else {
        committer = attempt.worker();
      }
    }
    if (!mismatch) {
      writes->push_back({StoreWrite::Kind::kPut, TaskKey('t', job->id(), i), tasks[i].SerializeAsString()});
      continue;
    }
    if (committer.empty()) continue;
    // More than one may be named that did nothing wrong: their results are audited.
    std::set<std::string> others;
    for (const AttemptRecord& attempt : attempts) {
      if (attempt.worker() != committer) others.insert(attempt.worker());
    }
    if (others.empty()) others.insert(committer);
    for (const std::string& other : others) {
      JobRecord::Dispute& dispute = *job->add_disputes();
      dispute.set_worker(other);
      dispute.set_other(committer);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PrepareStore(JobStore* store, const std::string& name) {
  const absl::StatusOr<std::string> text = store->Get(kVersionKey);
  quern::store::StoreVersion version;
  if (absl::IsNotFound(text.status())) {
    // Only an empty store is new: records without a version were written by something else.
    bool empty = true;
    QUERN_RETURN_IF_ERROR(store->Scan("", [&](absl::string_view, absl::string_view) {
      empty = false;
      return absl::OkStatus();
    }));
    if (!empty) return absl::DataLossError(absl::StrCat("job store ", name, " has records but no version"));
    return store->WriteSync({VersionWrite()});
  }
  QUERN_RETURN_IF_ERROR(text.status());
  if (!version.ParseFromString(*text) || version.version() == 0) {
    return absl::DataLossError(absl::StrCat("job store ", name, ": unreadable version record"));
  }
  if (version.version() > kStoreVersion) {
    return absl::FailedPreconditionError(absl::StrCat("job store ", name, " has version ", version.version(), ", this program knows ",
                                                      kStoreVersion, ": use the newer program or another --state-dir"));
  }
  if (version.version() == kStoreVersion) return absl::OkStatus();
  std::vector<StoreWrite> writes;
  QUERN_ASSIGN_OR_RETURN(std::vector<JobRecord> jobs, ReadRecords<JobRecord>(store, name, "j"));
  for (JobRecord& job : jobs) {
    if (version.version() < 2) QUERN_RETURN_IF_ERROR(AddNumericsVersion(store, name, &job));
    QUERN_RETURN_IF_ERROR(AddWhoAudited(store, name, &job, &writes));
    writes.push_back({StoreWrite::Kind::kPut, JobKey('j', job.id()), job.SerializeAsString()});
  }
  writes.push_back(VersionWrite());
  return store->WriteSync(std::move(writes));
}

}  // namespace quern::daemon
