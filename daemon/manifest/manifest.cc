#include "daemon/manifest/manifest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/digest.h"
#include "base/status_macros.h"

namespace quern::daemon {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr uint64_t kFormatVersion = 1;

// The lists of tensors in the order of the file.
constexpr const char* kLists[] = {"modules", "copied", "dropped"};
constexpr int kModules = 0;
constexpr int kCopied = 1;
constexpr int kDropped = 2;
constexpr int kEnd = 3;

std::string Dump(const OrderedJson& value) {
  // Names from a checkpoint are UTF-8 already; whatever is not must not throw here.
  return value.dump(-1, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace);
}

OrderedJson DoubleToJson(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

OrderedJson ToJson(const ManifestFile& file, const char* digest_key) {
  OrderedJson json;
  json["name"] = file.name;
  json["size"] = file.size;
  json[digest_key] = HexDigest(file.sha256);
  return json;
}

OrderedJson ToJson(const ManifestModule& module) {
  OrderedJson error;
  error["count"] = module.error.count();
  error["sum_squared_error"] = DoubleToJson(module.error.sum_squared_error());
  error["sum_squares"] = DoubleToJson(module.error.sum_squares());
  error["max_abs_error"] = DoubleToJson(module.error.max_abs_error());
  error["nonfinite"] = module.error.nonfinite();
  OrderedJson json;
  json["module"] = module.module;
  json["role"] = module.role;
  json["scheme"] = module.scheme;
  json["reason"] = module.reason;
  json["shard"] = module.shard;
  json["source_tensor"] = module.source_tensor;
  json["source_file"] = module.source_file;
  json["source_dtype"] = module.source_dtype;
  json["source_shape"] = module.source_shape;
  json["source_digest"] = HexDigest(module.source_digest);
  if (module.stack.has_value()) {
    json["stack"] = {{"tensor", module.stack->tensor},
                     {"offset", module.stack->offset},
                     {"row_stride", module.stack->row_stride},
                     {"col_stride", module.stack->col_stride}};
  }
  json["error"] = std::move(error);
  return json;
}

OrderedJson ToJson(const ManifestCopy& copy) {
  OrderedJson json;
  json["tensor"] = copy.tensor;
  json["role"] = copy.role;
  json["reason"] = copy.reason;
  json["shard"] = copy.shard;
  json["source_file"] = copy.source_file;
  json["source_digest"] = HexDigest(copy.source_digest);
  return json;
}

OrderedJson ToJson(const ManifestDropped& dropped) {
  OrderedJson json;
  json["tensor"] = dropped.tensor;
  json["reason"] = dropped.reason;
  return json;
}

void AppendFiles(const char* key, const std::vector<ManifestFile>& files, const char* digest_key, std::string* text) {
  absl::StrAppend(text, "  \"", key, "\": [");
  for (size_t i = 0; i < files.size(); ++i) absl::StrAppend(text, i == 0 ? "\n    " : ",\n    ", Dump(ToJson(files[i], digest_key)));
  absl::StrAppend(text, files.empty() ? "],\n" : "\n  ],\n");
}

// Reads members of one object; the first problem is kept, later reads give empty values.
class ObjectReader {
 public:
  ObjectReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  std::string String(const char* key) {
    const Json* value = Find(key);
    if (value == nullptr) return "";
    if (const auto* text = value->get_ptr<const Json::string_t*>()) return *text;
    Fail(key, "is no string");
    return "";
  }

  uint64_t Uint(const char* key) {
    const Json* value = Find(key);
    if (value == nullptr) return 0;
    if (const auto* number = value->get_ptr<const Json::number_unsigned_t*>()) return *number;
    Fail(key, "is no unsigned integer");
    return 0;
  }

  double Double(const char* key) {
    const Json* value = Find(key);
    if (value == nullptr) return 0;
    if (value->is_number()) return value->get<double>();
    if (const auto* text = value->get_ptr<const Json::string_t*>()) {
      if (*text == "inf") return std::numeric_limits<double>::infinity();
      if (*text == "-inf") return -std::numeric_limits<double>::infinity();
      if (*text == "nan") return std::numeric_limits<double>::quiet_NaN();
    }
    Fail(key, "is no number");
    return 0;
  }

  std::string Digest(const char* key, size_t size) {
    const std::string hex = String(key);
    if (!status_.ok()) return "";
    const bool valid = hex.size() == 2 * size && std::all_of(hex.begin(), hex.end(), [](char c) { return absl::ascii_isxdigit(c); });
    if (valid) return absl::HexStringToBytes(hex);
    Fail(key, absl::StrCat("is no digest of ", size, " bytes"));
    return "";
  }

  std::vector<uint64_t> Shape(const char* key) {
    std::vector<uint64_t> shape;
    const Json* value = Find(key);
    if (value == nullptr) return shape;
    if (!value->is_array()) {
      Fail(key, "is no list");
      return shape;
    }
    for (const Json& dimension : *value) {
      const auto* number = dimension.get_ptr<const Json::number_unsigned_t*>();
      if (number == nullptr) {
        Fail(key, "holds something that is no unsigned integer");
        return shape;
      }
      shape.push_back(*number);
    }
    return shape;
  }

  // A relative path that stays in the directory.
  std::string FileName(const char* key) {
    std::string name = String(key);
    if (!status_.ok()) return "";
    for (absl::string_view part : absl::StrSplit(name, '/')) {
      if (!part.empty() && part != "." && part != ".." && part.find('\0') == absl::string_view::npos) continue;
      Fail(key, absl::StrCat("is no plain relative path: \"", absl::CHexEscape(name), "\""));
      return "";
    }
    return name;
  }

  bool Has(const char* key) const { return object_.contains(key); }

  const Json* Object(const char* key) {
    const Json* value = Find(key);
    if (value != nullptr && !value->is_object()) {
      Fail(key, "is no object");
      return nullptr;
    }
    return value;
  }

  void Merge(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }
  const absl::Status& status() const { return status_; }

 private:
  const Json* Find(const char* key) {
    if (!status_.ok()) return nullptr;
    const auto it = object_.find(key);
    if (it != object_.end()) return &*it;
    Fail(key, "is missing");
    return nullptr;
  }

  void Fail(const char* key, absl::string_view problem) {
    if (status_.ok()) status_ = absl::DataLossError(absl::StrCat(where_, ": \"", key, "\" ", problem));
  }

  const Json& object_;
  const std::string where_;
  absl::Status status_;
};

absl::Status Append(const Json& json, std::string where, const char* digest_key, std::vector<ManifestFile>* files) {
  ObjectReader reader(json, std::move(where));
  ManifestFile file;
  file.name = reader.FileName("name");
  file.size = reader.Uint("size");
  file.sha256 = reader.Digest(digest_key, Sha256::kSize);
  files->push_back(std::move(file));
  return reader.status();
}

constexpr size_t kViewDigestSize = 16;

absl::Status Append(const Json& json, std::string where, std::vector<ManifestModule>* modules) {
  ObjectReader reader(json, where);
  ManifestModule module;
  module.module = reader.String("module");
  module.role = reader.String("role");
  module.scheme = reader.String("scheme");
  module.reason = reader.String("reason");
  module.shard = reader.FileName("shard");
  module.source_tensor = reader.String("source_tensor");
  module.source_file = reader.FileName("source_file");
  module.source_dtype = reader.String("source_dtype");
  module.source_shape = reader.Shape("source_shape");
  module.source_digest = reader.Digest("source_digest", kViewDigestSize);
  if (const Json* object = reader.Object("error")) {
    ObjectReader error(*object, absl::StrCat(where, ": error"));
    module.error.set_module(module.module);
    module.error.set_count(error.Uint("count"));
    module.error.set_sum_squared_error(error.Double("sum_squared_error"));
    module.error.set_sum_squares(error.Double("sum_squares"));
    module.error.set_max_abs_error(error.Double("max_abs_error"));
    module.error.set_nonfinite(error.Uint("nonfinite"));
    reader.Merge(error.status());
  }
  if (reader.Has("stack")) {
    if (const Json* object = reader.Object("stack")) {
      ObjectReader stack(*object, absl::StrCat(where, ": stack"));
      module.stack = {stack.String("tensor"), stack.Uint("offset"), stack.Uint("row_stride"), stack.Uint("col_stride")};
      reader.Merge(stack.status());
    }
  }
  modules->push_back(std::move(module));
  return reader.status();
}

absl::Status Append(const Json& json, std::string where, std::vector<ManifestCopy>* copies) {
  ObjectReader reader(json, std::move(where));
  ManifestCopy copy;
  copy.tensor = reader.String("tensor");
  copy.role = reader.String("role");
  copy.reason = reader.String("reason");
  copy.shard = reader.FileName("shard");
  copy.source_file = reader.FileName("source_file");
  copy.source_digest = reader.Digest("source_digest", kViewDigestSize);
  copies->push_back(std::move(copy));
  return reader.status();
}

absl::Status Append(const Json& json, std::string where, std::vector<ManifestDropped>* dropped) {
  ObjectReader reader(json, std::move(where));
  ManifestDropped entry;
  entry.tensor = reader.String("tensor");
  entry.reason = reader.String("reason");
  dropped->push_back(std::move(entry));
  return reader.status();
}

// Entries are taken out of the lists as they are parsed, so that the tree of a large file never stands in memory.
absl::StatusOr<Manifest> Parse(absl::string_view text, absl::string_view path, bool only_files) {
  Manifest manifest;
  absl::Status status;
  std::string section;
  size_t position = 0;
  std::set<std::string> seen;
  const auto take = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (!status.ok()) return false;
    if (depth == 1 && event == Json::parse_event_t::key) {
      section = parsed.get<std::string>();
      position = 0;
      if (!seen.insert(section).second) status = absl::DataLossError(absl::StrCat(path, ": \"", section, "\" stands there twice"));
      return true;
    }
    if (depth != 2 || event != Json::parse_event_t::object_end) return true;
    const auto where = [&] { return absl::StrCat(path, ": ", section, "[", position++, "]"); };
    if (section == "files") {
      status = Append(parsed, where(), "sha256", &manifest.files);
    } else if (section == "inputs") {
      if (!only_files) status = Append(parsed, where(), "sha256", &manifest.inputs);
    } else if (section == "source_files") {
      if (!only_files) status = Append(parsed, where(), "header_sha256", &manifest.source_files);
    } else if (section == kLists[kModules]) {
      if (!only_files) status = Append(parsed, where(), &manifest.modules);
    } else if (section == kLists[kCopied]) {
      if (!only_files) status = Append(parsed, where(), &manifest.copied);
    } else if (section == kLists[kDropped]) {
      if (!only_files) status = Append(parsed, where(), &manifest.dropped);
    } else {
      return true;
    }
    return false;
  };

  Json root;
  try {
    root = Json::parse(text.data(), text.data() + text.size(), take);
  } catch (const Json::exception& e) {
    return absl::DataLossError(absl::StrCat(path, ": ", e.what()));
  }
  QUERN_RETURN_IF_ERROR(status);
  if (!root.is_object()) return absl::DataLossError(absl::StrCat(path, ": is no JSON object"));
  for (const char* list : {"source_files", "files", kLists[kModules], kLists[kCopied], kLists[kDropped]}) {
    const auto it = root.find(list);
    if (it == root.end()) return absl::DataLossError(absl::StrCat(path, ": \"", list, "\" is missing"));
    // All objects have been taken out.
    if (!it->is_array() || !it->empty()) return absl::DataLossError(absl::StrCat(path, ": \"", list, "\" is no list of objects"));
  }
  // Only outputs that were made from such files have this one.
  if (const auto inputs = root.find("inputs"); inputs != root.end() && (!inputs->is_array() || !inputs->empty())) {
    return absl::DataLossError(absl::StrCat(path, ": \"inputs\" is no list of objects"));
  }
  ObjectReader reader(root, std::string(path));
  manifest.format_version = reader.Uint("format_version");
  manifest.numerics_version = reader.Uint("numerics_version");
  manifest.export_format = reader.String("export_format");
  manifest.max_shard_size = reader.Uint("max_shard_size");
  manifest.recipe = reader.String("recipe");
  QUERN_RETURN_IF_ERROR(reader.status());
  if (manifest.format_version > kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": format_version is ", manifest.format_version, ", this Quern reads up to ",
                                                      kFormatVersion, "; use a newer Quern"));
  }
  return manifest;
}

}  // namespace

absl::Status ManifestWriter::Begin(const Manifest& head) {
  std::string text = "{\n";
  absl::StrAppend(&text, "  \"format_version\": ", head.format_version, ",\n");
  absl::StrAppend(&text, "  \"numerics_version\": ", head.numerics_version, ",\n");
  absl::StrAppend(&text, "  \"export_format\": ", Dump(head.export_format), ",\n");
  absl::StrAppend(&text, "  \"max_shard_size\": ", head.max_shard_size, ",\n");
  absl::StrAppend(&text, "  \"recipe\": ", Dump(head.recipe), ",\n");
  AppendFiles("source_files", head.source_files, "header_sha256", &text);
  if (!head.inputs.empty()) AppendFiles("inputs", head.inputs, "sha256", &text);
  AppendFiles("files", head.files, "sha256", &text);
  QUERN_RETURN_IF_ERROR(sink_(text));
  return OpenList(kModules);
}

absl::Status ManifestWriter::OpenList(int list) {
  std::string text;
  while (list_ < list) {
    if (list_ >= 0) absl::StrAppend(&text, first_ ? "]" : "\n  ]", list_ + 1 < kEnd ? ",\n" : "\n}\n");
    ++list_;
    first_ = true;
    if (list_ < kEnd) absl::StrAppend(&text, "  \"", kLists[list_], "\": [");
  }
  return text.empty() ? absl::OkStatus() : sink_(text);
}

absl::Status ManifestWriter::AddTo(int list, std::string entry) {
  if (list_ < 0 || list_ > list) return absl::FailedPreconditionError(absl::StrCat("manifest: entry of ", kLists[list], " out of order"));
  QUERN_RETURN_IF_ERROR(OpenList(list));
  const char* separator = first_ ? "\n    " : ",\n    ";
  first_ = false;
  return sink_(absl::StrCat(separator, entry));
}

absl::Status ManifestWriter::Add(const ManifestModule& module) { return AddTo(kModules, Dump(ToJson(module))); }
absl::Status ManifestWriter::Add(const ManifestCopy& copy) { return AddTo(kCopied, Dump(ToJson(copy))); }
absl::Status ManifestWriter::Add(const ManifestDropped& dropped) { return AddTo(kDropped, Dump(ToJson(dropped))); }
absl::Status ManifestWriter::Finish() {
  if (list_ < 0) return absl::FailedPreconditionError("manifest: finished before it was begun");
  return OpenList(kEnd);
}

std::string ManifestToJson(const Manifest& manifest) {
  std::string text;
  ManifestWriter writer([&text](absl::string_view piece) {
    absl::StrAppend(&text, piece);
    return absl::OkStatus();
  });
  // Neither the sink nor the order of these calls can fail.
  writer.Begin(manifest).IgnoreError();
  for (const ManifestModule& module : manifest.modules) writer.Add(module).IgnoreError();
  for (const ManifestCopy& copy : manifest.copied) writer.Add(copy).IgnoreError();
  for (const ManifestDropped& dropped : manifest.dropped) writer.Add(dropped).IgnoreError();
  writer.Finish().IgnoreError();
  return text;
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view json, absl::string_view path) { return Parse(json, path, /*only_files=*/false); }

absl::StatusOr<std::vector<ManifestFile>> ParseManifestFiles(absl::string_view json, absl::string_view path) {
  QUERN_ASSIGN_OR_RETURN(Manifest manifest, Parse(json, path, /*only_files=*/true));
  return std::move(manifest.files);
}

}  // namespace quern::daemon
