#include "client/manifest_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "client/human.h"
#include "client/tables.h"

namespace quern::client {
namespace {

using Json = nlohmann::json;

// Doubles that JSON cannot write are strings in a manifest: a cast of "nan" would throw.
double Number(const Json& object, const char* key) {
  const Json& value = object.at(key);
  if (!value.is_string()) return value.get<double>();
  const std::string& text = value.get_ref<const std::string&>();
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  return std::numeric_limits<double>::quiet_NaN();
}

void AddModule(const Json& entry, ManifestSummary& summary) {
  const Json& error = entry.at("error");
  ManifestSummary::Module module;
  module.name = entry.at("module").get<std::string>();
  module.sum_squared_error = Number(error, "sum_squared_error");
  module.sum_squares = Number(error, "sum_squares");
  module.max_abs_error = Number(error, "max_abs_error");
  ManifestSummary::Scheme& scheme = summary.schemes[entry.at("scheme").get<std::string>()];
  ++scheme.modules;
  scheme.weights += error.at("count").get<uint64_t>();
  scheme.sum_squared_error += module.sum_squared_error;
  scheme.sum_squares += module.sum_squares;
  scheme.max_abs_error = std::max(scheme.max_abs_error, module.max_abs_error);
  summary.worst.push_back(std::move(module));
}

void KeepWorst(size_t count, std::vector<ManifestSummary::Module>& modules) {
  std::stable_sort(modules.begin(), modules.end(), [](const auto& a, const auto& b) { return a.relative_error() > b.relative_error(); });
  if (modules.size() > count) modules.resize(count);
}

}  // namespace

absl::StatusOr<ManifestSummary> SummarizeManifest(absl::string_view json, size_t worst_modules) {
  ManifestSummary summary;
  std::string list;
  // Entries of the lists are looked at and dropped as they end, since a manifest of a large model has tens of thousands of them.
  const auto visit = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::key) list = parsed.get<std::string>();
    if (depth != 2 || event != Json::parse_event_t::object_end) return true;
    if (list == "modules") {
      AddModule(parsed, summary);
      if (summary.worst.size() > 2 * worst_modules + 1000) KeepWorst(worst_modules, summary.worst);
    } else if (list == "files") {
      ++summary.files;
      summary.bytes += parsed.at("size").get<uint64_t>();
    } else if (list == "copied") {
      ++summary.copied;
    } else if (list == "dropped") {
      ++summary.dropped;
    }
    return false;
  };
  try {
    const Json head = Json::parse(json.begin(), json.end(), visit);
    if (!head.is_object() || !head.contains("format_version")) return absl::DataLossError("this is no manifest of Quern");
  } catch (const Json::exception& e) {
    return absl::DataLossError(absl::StrCat("this is no manifest of Quern: ", e.what()));
  }
  KeepWorst(worst_modules, summary.worst);
  return summary;
}

absl::StatusOr<ManifestSummary> ReadManifestSummary(const std::string& directory, size_t worst_modules) {
  const std::string path = JoinPath(directory, "quern_manifest.json");
  QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path));
  absl::StatusOr<ManifestSummary> summary = SummarizeManifest(text, worst_modules);
  if (!summary.ok()) return Annotate(summary.status(), path);
  return summary;
}

std::string FormatManifestSummary(const ManifestSummary& summary) {
  std::string text =
      absl::StrCat(FormatCount(summary.files), " files, ", FormatByteSize(summary.bytes), "; ", FormatCount(summary.copied),
                   " tensors copied", summary.dropped > 0 ? absl::StrCat(", ", FormatCount(summary.dropped), " dropped") : "", "\n");
  if (!summary.schemes.empty()) {
    Table table({{"SCHEME"}, {"MODULES", kRight}, {"WEIGHTS", kRight}, {"SQNR", kRight}, {"MAX ERROR", kRight}});
    for (const auto& [name, scheme] : summary.schemes) {
      table.AddRow({name, FormatCount(scheme.modules), FormatCount(scheme.weights),
                    FormatSqnr(scheme.sum_squares, scheme.sum_squared_error), absl::StrFormat("%.3g", scheme.max_abs_error)});
    }
    absl::StrAppend(&text, "\n", table.ToString());
  }
  if (!summary.worst.empty()) {
    Table table({{"WORST MODULES"}, {"SQNR", kRight}, {"MAX ERROR", kRight}});
    for (const auto& module : summary.worst) {
      table.AddRow({module.name, FormatSqnr(module.sum_squares, module.sum_squared_error), absl::StrFormat("%.3g", module.max_abs_error)});
    }
    absl::StrAppend(&text, "\n", table.ToString());
  }
  return text;
}

}  // namespace quern::client
