#include "checkpoint/index.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/json_cursor.h"

namespace quern::checkpoint {
namespace {

bool IsPlainFileName(absl::string_view name) {
  if (name.empty() || name == "." || name == "..") return false;
  for (const char c : name) {
    if (c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7F) return false;
  }
  return true;
}

bool IsNumber(absl::string_view value) { return !value.empty() && (value[0] == '-' || (value[0] >= '0' && value[0] <= '9')); }

absl::Status ReadMetadata(JsonCursor& cursor, ShardIndex* index) {
  return cursor.ReadObject([&](std::string& key) -> absl::Status {
    const size_t start = cursor.position();
    QUERN_ASSIGN_OR_RETURN(absl::string_view value, cursor.ReadValue());
    if (key == "total_size") {
      if (index->total_size) return cursor.ErrorAt("\"total_size\" stands twice", start);
      uint64_t size;
      // Some tools write a fraction. The number is only ever shown, and computed anew for the output.
      if (JsonCursor(value).ReadUnsigned(&size).ok()) index->total_size = size;
    } else if (key == "total_parameters" && IsNumber(value)) {
      if (index->total_parameters) return cursor.ErrorAt("\"total_parameters\" stands twice", start);
      index->total_parameters = std::string(value);
    }
    return absl::OkStatus();
  });
}

absl::Status ReadWeightMap(JsonCursor& cursor, ShardIndex* index) {
  return cursor.ReadObject([&](std::string& tensor) -> absl::Status {
    const size_t start = cursor.position();
    std::string file;
    QUERN_RETURN_IF_ERROR(Annotate(cursor.ReadString(&file), absl::StrCat("tensor ", QuoteJson(tensor))));
    if (!IsPlainFileName(file)) {
      return cursor.ErrorAt(absl::StrCat("tensor ", QuoteJson(tensor), " is said to lie in ", QuoteJson(file),
                                         ", which is no plain file name of this directory"),
                            start);
    }
    const size_t before = index->weight_map.size();
    // Indexes are sorted as a rule, which makes the end the right hint.
    const auto entry = index->weight_map.try_emplace(index->weight_map.end(), std::move(tensor), std::move(file));
    if (index->weight_map.size() == before) {
      return cursor.ErrorAt(absl::StrCat("tensor ", QuoteJson(entry->first), " stands twice in weight_map"), start);
    }
    return absl::OkStatus();
  });
}

absl::Status Read(absl::string_view text, ShardIndex* index) {
  JsonCursor cursor(text, JsonCursor::Numbers::kPython);
  bool has_map = false;
  bool has_metadata = false;
  QUERN_RETURN_IF_ERROR(cursor.ReadObject([&](std::string& key) -> absl::Status {
    if (key == "weight_map") {
      if (has_map) return cursor.Error("\"weight_map\" stands twice");
      has_map = true;
      return ReadWeightMap(cursor, index);
    }
    if (key == "metadata" && cursor.NextIs('{')) {
      if (has_metadata) return cursor.Error("\"metadata\" stands twice");
      has_metadata = true;
      return ReadMetadata(cursor, index);
    }
    return cursor.SkipValue();
  }));
  QUERN_RETURN_IF_ERROR(cursor.ExpectEnd());
  if (!has_map) return absl::InvalidArgumentError("no \"weight_map\"");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view text, absl::string_view path) {
  if (IsGitLfsPointer(text)) return GitLfsPointerError(path);
  ShardIndex index;
  QUERN_RETURN_IF_ERROR(Annotate(Read(text, &index), path));
  return index;
}

std::string BuildShardIndex(const ShardIndex& index) {
  std::string text = "{\n  \"metadata\": {";
  const char* separator = "\n    ";
  if (index.total_parameters) {
    absl::StrAppend(&text, separator, "\"total_parameters\": ", *index.total_parameters);
    separator = ",\n    ";
  }
  if (index.total_size) absl::StrAppend(&text, separator, "\"total_size\": ", *index.total_size);
  absl::StrAppend(&text, index.total_parameters || index.total_size ? "\n  }" : "}", ",\n  \"weight_map\": {");
  separator = "\n    ";
  for (const auto& [tensor, file] : index.weight_map) {
    absl::StrAppend(&text, separator);
    AppendQuotedJson(tensor, &text);
    absl::StrAppend(&text, ": ");
    AppendQuotedJson(file, &text);
    separator = ",\n    ";
  }
  absl::StrAppend(&text, index.weight_map.empty() ? "}" : "\n  }", "\n}\n");
  return text;
}

}  // namespace quern::checkpoint
