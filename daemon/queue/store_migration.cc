#include "daemon/queue/store_migration.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
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

// Version 1 has the numerics version of a job only in its plan.
absl::Status MigrateFrom1(JobStore* store, const std::string& name, std::vector<StoreWrite>* writes) {
  std::vector<quern::store::JobRecord> jobs;
  QUERN_RETURN_IF_ERROR(store->Scan("j", [&](absl::string_view, absl::string_view value) {
    if (!jobs.emplace_back().ParseFromArray(value.data(), static_cast<int>(value.size()))) {
      return absl::DataLossError(absl::StrCat("job store ", name, ": unreadable record of a job"));
    }
    return absl::OkStatus();
  }));
  for (quern::store::JobRecord& job : jobs) {
    QUERN_ASSIGN_OR_RETURN(const std::string text, store->Get(JobKey('p', job.id())));
    quern::v1::PlanSummary plan;
    if (!plan.ParseFromString(text)) return absl::DataLossError(absl::StrCat("job store ", name, ": unreadable plan of jobs/", job.id()));
    job.set_numerics_version(plan.numerics_version());
    writes->push_back({StoreWrite::Kind::kPut, JobKey('j', job.id()), job.SerializeAsString()});
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
  std::vector<StoreWrite> writes;
  if (version.version() < 2) QUERN_RETURN_IF_ERROR(MigrateFrom1(store, name, &writes));
  if (version.version() == kStoreVersion) return absl::OkStatus();
  writes.push_back(VersionWrite());
  return store->WriteSync(std::move(writes));
}

}  // namespace quern::daemon
