// Who may write into an output directory: its owner record, its lock, and whether it is one of ours at all.
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file_roots.h"
#include "base/status_macros.h"
#include "daemon/manifest/manifest.h"
#include "daemon/publish/publish.h"
#include "daemon/publish/run_record.h"

namespace quern::daemon {
namespace {

using Json = nlohmann::json;

std::string QuernPath(const std::string& output, absl::string_view name) { return JoinPath(JoinPath(output, ".quern"), name); }

// The text of a string member of a JSON object, empty when there is none. Other members are not kept, so that a large file costs nothing.
std::string StringMember(absl::string_view text, const char* member) {
  const auto keep = [member](int depth, Json::parse_event_t event, Json& parsed) {
    return depth != 1 || event != Json::parse_event_t::key || parsed == member;
  };
  const Json root = Json::parse(text.data(), text.data() + text.size(), keep, /*allow_exceptions=*/false);
  if (!root.is_object()) return "";
  const auto it = root.find(member);
  return it != root.end() && it->is_string() ? it->get<std::string>() : "";
}

// Whether `path` and `fd` are the same file still: the holder before us may have removed it.
bool IsSameFile(int fd, const std::string& path) {
  struct stat open_file, named_file;
  return fstat(fd, &open_file) == 0 && ConfinedStat(path, &named_file) == 0 && open_file.st_dev == named_file.st_dev &&
         open_file.st_ino == named_file.st_ino;
}

absl::Status HeldByAnother(const std::string& output) {
  std::string who = "another coordinator";
  if (const absl::StatusOr<std::string> text = ReadFileToString(QuernPath(output, "owner.json")); text.ok()) {
    const std::string owner = StringMember(*text, "owner"), job = StringMember(*text, "job");
    if (!owner.empty()) who = absl::StrCat(owner, " for ", job);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("output ", output, " is being written by ", who, "; wait until it has ended, cancel it, or choose another output"));
}

}  // namespace

absl::Status CheckOutputUsable(const std::string& output, bool overwrite) {
  struct stat info;
  if (ConfinedStat(output, &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return ErrnoToStatus(errno, "stat", output);
  }
  if (!S_ISDIR(info.st_mode)) return absl::AlreadyExistsError(absl::StrCat("output ", output, " is a file; choose another output"));
  QUERN_ASSIGN_OR_RETURN(std::vector<std::string> names, ListDirectory(output));
  std::erase(names, ".quern");
  if (names.empty()) return absl::OkStatus();
  if (!FileExists(QuernPath(output, "owner.json")) && !FileExists(QuernPath(output, "run.json"))) {
    constexpr size_t kShown = 3;
    const size_t more = names.size() > kShown ? names.size() - kShown : 0;
    if (more > 0) names.resize(kShown);
    return absl::AlreadyExistsError(absl::StrCat("output ", output, " holds files that Quern did not write (", absl::StrJoin(names, ", "),
                                                 more > 0 ? absl::StrCat(" and ", more, " more") : "",
                                                 "); choose an empty or a new directory"));
  }
  if (overwrite) {
    const std::string path = JoinPath(output, kManifestName);
    const absl::StatusOr<std::string> text = ReadFileToString(path);
    if (absl::IsNotFound(text.status())) return absl::OkStatus();
    QUERN_RETURN_IF_ERROR(text.status());
    if (const auto files = ParseManifestFiles(*text, path); !files.ok()) {
      return absl::FailedPreconditionError(absl::StrCat("output ", output,
                                                        " cannot be overwritten, since its manifest does not say which files are its own (",
                                                        files.status().message(), "); remove the directory or choose another"));
    }
    return absl::OkStatus();
  }
  QUERN_ASSIGN_OR_RETURN(const RunRecord record, ReadRunRecord(output));
  if (record.identity.empty()) return absl::OkStatus();
  if (const absl::Status intact = FinishedIdentity(output).status(); !intact.ok()) {
    // --overwrite must know which files are ours.
    const bool listed = !record.files.empty() || (FileExists(JoinPath(output, kManifestName)) && CheckOutputUsable(output, true).ok());
    return absl::AlreadyExistsError(absl::StrCat("output ", output, " holds a finished result that is damaged: ", intact.message(), "; ",
                                                 listed ? "use --overwrite to make it anew" : "remove the directory",
                                                 ", or choose another output"));
  }
  return absl::AlreadyExistsError(
      absl::StrCat("output ", output, " holds a finished result; use --overwrite to replace it, or choose another output"));
}

absl::StatusOr<std::string> FinishedIdentity(const std::string& output) {
  QUERN_ASSIGN_OR_RETURN(RunRecord record, ReadRunRecord(output));
  if (record.identity.empty()) return absl::NotFoundError(absl::StrCat("output ", output, " holds no finished result"));
  const std::string path = JoinPath(output, kManifestName);
  if (record.files.empty()) {
    const absl::StatusOr<std::string> text = ReadFileToString(path);
    if (absl::IsNotFound(text.status())) return absl::NotFoundError(absl::StrCat(path, " is missing"));
    QUERN_RETURN_IF_ERROR(text.status());
    absl::StatusOr<std::vector<ManifestFile>> files = ParseManifestFiles(*text, path);
    if (!files.ok()) return absl::NotFoundError(files.status().message());
    record.files = *std::move(files);
  }
  for (const ManifestFile& file : record.files) {
    const std::string name = JoinPath(output, file.name);
    const absl::StatusOr<uint64_t> size = FileSize(name);
    if (absl::IsNotFound(size.status())) return absl::NotFoundError(absl::StrCat(name, " is missing"));
    QUERN_RETURN_IF_ERROR(size.status());
    if (*size != file.size) return absl::NotFoundError(absl::StrCat(name, " has ", *size, " bytes, it was written with ", file.size));
  }
  return std::move(record.identity);
}

absl::StatusOr<OutputClaim> OutputClaim::Acquire(const std::string& output, const std::string& owner, const std::string& job) {
  const std::string lock_path = QuernPath(output, "lock");
  OutputClaim claim;
  QUERN_ASSIGN_OR_RETURN(claim.tree_, LinklessTree::Open("/", output));
  // A holder that releases removes the lock and its directory; then the name is made anew. Every turn means that somebody got on.
  constexpr int kTurns = 1000;
  bool made = false;
  for (int turn = 0; turn < kTurns; ++turn) {
    made = made || !FileExists(output);
    QUERN_RETURN_IF_ERROR(MakeDirectories(JoinPath(output, ".quern")));
    absl::StatusOr<UniqueFd> fd = OpenFile(lock_path, O_RDWR | O_CREAT);
    if (absl::IsNotFound(fd.status())) continue;
    QUERN_RETURN_IF_ERROR(fd.status());
    int result;
    do {
      result = flock(fd->get(), LOCK_EX | LOCK_NB);
    } while (result != 0 && errno == EINTR);
    if (result != 0) return errno == EWOULDBLOCK ? HeldByAnother(output) : ErrnoToStatus(errno, "flock", lock_path);
    if (!IsSameFile(fd->get(), lock_path)) continue;
    claim.output_ = output;
    claim.lock_ = *std::move(fd);
    claim.made_output_ = made;
    const Json record = {{"owner", owner}, {"job", job}};
    QUERN_RETURN_IF_ERROR(
        WriteFileDurably(QuernPath(output, "owner.json"), absl::StrCat(record.dump(2, ' ', false, Json::error_handler_t::replace), "\n")));
    return claim;
  }
  return absl::UnavailableError(absl::StrCat("lock ", lock_path, " is taken and released all the time; try again"));
}

OutputClaim& OutputClaim::operator=(OutputClaim&& other) noexcept {
  if (this != &other) {
    Release();
    output_ = std::move(other.output_);
    tree_ = std::move(other.tree_);
    lock_ = std::move(other.lock_);
    made_output_ = other.made_output_;
  }
  return *this;
}

OutputClaim::~OutputClaim() { Release(); }

void OutputClaim::Release() {
  if (!lock_) return;
  // Files that cannot be removed harm nobody: the lock is what counts, and it goes with the descriptor.
  for (const char* name : {"owner.json", "owner.json.tmp", "lock"}) RemoveFile(QuernPath(output_, name)).IgnoreError();
  if (ConfinedRmdir(JoinPath(output_, ".quern")) == 0 && made_output_) ConfinedRmdir(output_);
  lock_.Reset();
  tree_.reset();
}

}  // namespace quern::daemon
