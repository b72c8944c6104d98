// What OUT/.quern/run.json says of the files in OUT.
#ifndef QUERN_DAEMON_PUBLISH_RUN_RECORD_H_
#define QUERN_DAEMON_PUBLISH_RUN_RECORD_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/manifest/manifest.h"

namespace quern::daemon {

struct RunRecord {
  std::string identity;             // raw; empty when OUT was never finished
  std::vector<ManifestFile> files;  // "files": all of a finished result that has no manifest
  std::vector<std::string> names;   // "publishing": what an unfinished publishing may have written
};

// Of an absent file, or of one that is not of our making, all is empty. Names are plain relative paths; others are left out.
absl::StatusOr<RunRecord> ReadRunRecord(const std::string& output);

// Text of run.json while a job is being published.
std::string PublishingJson(const RunRecord& record);

// `run_json` with "files"; INTERNAL when it is no JSON object.
absl::StatusOr<std::string> WithFiles(absl::string_view run_json, const std::vector<ManifestFile>& files);

// "a/b" without "..", ".", empty parts or a leading slash.
bool IsPlainRelativePath(absl::string_view name);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PUBLISH_RUN_RECORD_H_
