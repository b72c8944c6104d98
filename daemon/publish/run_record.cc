#include "daemon/publish/run_record.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace quern::daemon {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Raw bytes of a member that is a SHA-256 in hexadecimal; empty when it is anything else.
std::string DigestMember(const OrderedJson& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end() || !it->is_string()) return "";
  const std::string hex = it->get<std::string>();
  const bool valid = hex.size() == 2 * Sha256::kSize && std::all_of(hex.begin(), hex.end(), [](char c) { return absl::ascii_isxdigit(c); });
  return valid ? absl::HexStringToBytes(hex) : "";
}

OrderedJson ToJson(const std::vector<ManifestFile>& files) {
  OrderedJson list = OrderedJson::array();
  for (const ManifestFile& file : files) list.push_back({{"name", file.name}, {"size", file.size}, {"sha256", HexDigest(file.sha256)}});
  return list;
}

std::string Dump(const OrderedJson& json) { return json.dump(1, ' ', false, OrderedJson::error_handler_t::replace) + "\n"; }

}  // namespace

absl::StatusOr<RunRecord> ReadRunRecord(const std::string& output) {
  RunRecord record;
  const absl::StatusOr<std::string> text = ReadFileToString(JoinPath(output, ".quern/run.json"));
  if (absl::IsNotFound(text.status())) return record;
  QUERN_RETURN_IF_ERROR(text.status());
  // The history of a large job is not kept in memory.
  const auto keep = [](int depth, OrderedJson::parse_event_t event, OrderedJson& parsed) {
    return depth != 1 || event != OrderedJson::parse_event_t::key || parsed == "identity" || parsed == "files" || parsed == "publishing";
  };
  const OrderedJson root = OrderedJson::parse(text->begin(), text->end(), keep, /*allow_exceptions=*/false);
  if (!root.is_object()) return record;
  record.identity = DigestMember(root, "identity");
  if (const auto files = root.find("files"); files != root.end() && files->is_array()) {
    for (const OrderedJson& entry : *files) {
      if (!entry.is_object()) continue;
      const auto name = entry.find("name"), size = entry.find("size");
      if (name == entry.end() || !name->is_string() || size == entry.end() || !size->is_number_unsigned()) continue;
      ManifestFile file{name->get<std::string>(), size->get<uint64_t>(), DigestMember(entry, "sha256")};
      if (IsPlainRelativePath(file.name)) record.files.push_back(std::move(file));
    }
  }
  if (const auto names = root.find("publishing"); names != root.end() && names->is_array()) {
    for (const OrderedJson& name : *names) {
      if (name.is_string() && IsPlainRelativePath(name.get<std::string>())) record.names.push_back(name.get<std::string>());
    }
  }
  return record;
}

std::string PublishingJson(const RunRecord& record) {
  OrderedJson json = {{"state", "publishing"}, {"publishing", record.names}};
  if (!record.files.empty()) json["files"] = ToJson(record.files);
  return Dump(json);
}

absl::StatusOr<std::string> WithFiles(absl::string_view run_json, const std::vector<ManifestFile>& files) {
  OrderedJson json = OrderedJson::parse(run_json.begin(), run_json.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InternalError("the history of the job is no JSON object");
  json["files"] = ToJson(files);
  return Dump(json);
}

bool IsPlainRelativePath(absl::string_view name) {
  for (absl::string_view part : absl::StrSplit(name, '/')) {
    if (part.empty() || part == "." || part == ".." || part.find('\0') != absl::string_view::npos) return false;
  }
  return true;
}

}  // namespace quern::daemon
