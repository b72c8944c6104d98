#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/json_cursor.h"

namespace quern::checkpoint {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr size_t kMaxRank = 64;  // as NumPy
constexpr absl::string_view kMetadataKey = "__metadata__";
constexpr uint64_t kHeaderAlignment = 4096;

std::string LengthBytes(uint64_t length) {
  std::string bytes(kLengthBytes, '\0');
  for (uint64_t i = 0; i < kLengthBytes; ++i) bytes[i] = static_cast<char>(length >> (8 * i));
  return bytes;
}

uint64_t LengthFromBytes(const char* bytes) {
  uint64_t length = 0;
  for (uint64_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return length;
}

std::string ShapeText(const std::vector<uint64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ","), "]"); }

bool HasControlCharacter(absl::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; });
}

// Bytes of a tensor, or why there is no such number.
absl::StatusOr<uint64_t> TensorBytes(DType dtype, const std::vector<uint64_t>& shape) {
  uint64_t bits = BitsPerElement(dtype);
  for (const uint64_t dimension : shape) {
    if (__builtin_mul_overflow(bits, dimension, &bits)) return absl::InvalidArgumentError("its size in bits overflows 64 bits");
  }
  if (bits % 8 != 0) return absl::InvalidArgumentError(absl::StrCat("its ", bits, " bits are no whole number of bytes"));
  return bits / 8;
}

absl::Status ReadMetadata(JsonCursor& cursor, std::vector<std::pair<std::string, std::string>>* metadata) {
  absl::flat_hash_set<std::string> keys;
  return cursor.ReadObject([&](std::string& key) -> absl::Status {
    if (!keys.insert(key).second) return cursor.Error(absl::StrCat("the key ", QuoteJson(key), " stands twice in __metadata__"));
    std::string value;
    QUERN_RETURN_IF_ERROR(cursor.ReadString(&value));
    metadata->emplace_back(std::move(key), std::move(value));
    return absl::OkStatus();
  });
}

// Reads {dtype, shape, data_offsets} into `tensor`. Other members are skipped, as the reference reader does.
absl::Status ReadTensor(JsonCursor& cursor, uint64_t data_size, TensorInfo* tensor) {
  std::optional<DType> dtype;
  bool has_shape = false;
  std::optional<std::pair<uint64_t, uint64_t>> range;
  const size_t start = cursor.position();
  QUERN_RETURN_IF_ERROR(cursor.ReadObject([&](std::string& key) -> absl::Status {
    if (key == "dtype") {
      if (dtype) return cursor.Error("\"dtype\" stands twice");
      std::string name;
      QUERN_RETURN_IF_ERROR(cursor.ReadString(&name));
      absl::StatusOr<DType> parsed = ParseDType(name);
      if (!parsed.ok()) return cursor.Error(absl::StrCat("unknown dtype ", QuoteJson(name)));
      dtype = *parsed;
    } else if (key == "shape") {
      if (has_shape) return cursor.Error("\"shape\" stands twice");
      has_shape = true;
      QUERN_RETURN_IF_ERROR(cursor.ReadArray([&]() -> absl::Status {
        if (tensor->shape.size() == kMaxRank) return cursor.Error(absl::StrCat("a shape of more than ", kMaxRank, " dimensions"));
        uint64_t dimension;
        QUERN_RETURN_IF_ERROR(cursor.ReadUnsigned(&dimension));
        tensor->shape.push_back(dimension);
        return absl::OkStatus();
      }));
    } else if (key == "data_offsets") {
      if (range) return cursor.Error("\"data_offsets\" stands twice");
      uint64_t ends[2];
      size_t count = 0;
      QUERN_RETURN_IF_ERROR(cursor.ReadArray([&]() -> absl::Status {
        if (count == 2) return cursor.Error("more than two data_offsets");
        return cursor.ReadUnsigned(&ends[count++]);
      }));
      if (count != 2) return cursor.Error("fewer than two data_offsets");
      range.emplace(ends[0], ends[1]);
    } else {
      QUERN_RETURN_IF_ERROR(cursor.SkipValue());
    }
    return absl::OkStatus();
  }));
  if (!dtype) return cursor.ErrorAt("no \"dtype\"", start);
  if (!has_shape) return cursor.ErrorAt("no \"shape\"", start);
  if (!range) return cursor.ErrorAt("no \"data_offsets\"", start);
  tensor->dtype = *dtype;
  tensor->begin = range->first;
  tensor->end = range->second;
  const auto error = [&](absl::string_view problem) {
    return cursor.ErrorAt(absl::StrCat(DTypeName(tensor->dtype), " ", ShapeText(tensor->shape), " with data_offsets [", tensor->begin, ",",
                                       tensor->end, "]", problem),
                          start);
  };
  if (tensor->end < tensor->begin) return error(" ends before it begins");
  if (tensor->end > data_size) return error(absl::StrCat(" goes past the end of the file, which has ", data_size, " bytes of data"));
  absl::StatusOr<uint64_t> bytes = TensorBytes(*dtype, tensor->shape);
  if (!bytes.ok()) return error(absl::StrCat(": ", bytes.status().message()));
  if (*bytes != tensor->bytes()) return error(absl::StrCat(" needs ", *bytes, " bytes and has ", tensor->bytes()));
  return absl::OkStatus();
}

// Sorts by range and checks that the ranges cover [0, data_size) once.
absl::Status CheckCoverage(uint64_t data_size, std::vector<TensorInfo>* tensors) {
  const auto before = [](const TensorInfo& a, const TensorInfo& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; };
  if (!std::is_sorted(tensors->begin(), tensors->end(), before)) std::stable_sort(tensors->begin(), tensors->end(), before);
  uint64_t covered = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& tensor : *tensors) {
    if (tensor.begin < covered) {
      return absl::InvalidArgumentError(absl::StrCat("tensors ", QuoteJson(previous->name), " and ", QuoteJson(tensor.name),
                                                     " overlap: the second begins at data offset ", tensor.begin, ", the first ends at ",
                                                     covered));
    }
    if (tensor.begin > covered) {
      return absl::InvalidArgumentError(
          absl::StrCat("data offsets ", covered, " to ", tensor.begin, " belong to no tensor: a hole before ", QuoteJson(tensor.name)));
    }
    covered = tensor.end;
    previous = &tensor;
  }
  if (covered != data_size) {
    return absl::InvalidArgumentError(absl::StrCat("the tensors end at data offset ", covered, ", the file has ", data_size,
                                                   " bytes of data",
                                                   previous ? absl::StrCat("; the last tensor is ", QuoteJson(previous->name)) : ""));
  }
  return absl::OkStatus();
}

absl::Status CheckUniqueNames(const std::vector<TensorInfo>& tensors) {
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", QuoteJson(tensor.name), " stands twice in the header"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t TensorInfo::elements() const {
  uint64_t count = 1;
  for (const uint64_t dimension : shape) count *= dimension;
  return count;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json, uint64_t file_size, absl::string_view path) {
  if (json.size() > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a header of ", json.size(), " bytes; the format allows ", kMaxHeaderBytes));
  }
  if (file_size < kLengthBytes || file_size - kLengthBytes < json.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the header of ", json.size(), " bytes does not fit the file of ", file_size, " bytes"));
  }
  const uint64_t data_size = file_size - kLengthBytes - json.size();
  SafetensorsHeader header;
  header.data_start = kLengthBytes + json.size();
  JsonCursor cursor(json, JsonCursor::Numbers::kJson, kLengthBytes);
  bool has_metadata = false;
  absl::Status status = cursor.ReadObject([&](std::string& name) -> absl::Status {
    if (name == kMetadataKey) {
      if (has_metadata) return cursor.Error("__metadata__ stands twice");
      has_metadata = true;
      return Annotate(ReadMetadata(cursor, &header.metadata), "__metadata__");
    }
    if (HasControlCharacter(name)) return cursor.Error("a tensor name with a control character");
    TensorInfo tensor;
    tensor.name = std::move(name);
    absl::Status read = ReadTensor(cursor, data_size, &tensor);
    if (!read.ok()) return Annotate(read, absl::StrCat("tensor ", QuoteJson(tensor.name)));
    header.tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  });
  if (status.ok()) status = cursor.ExpectEnd();
  if (status.ok()) status = CheckUniqueNames(header.tensors);
  if (status.ok()) status = CheckCoverage(data_size, &header.tensors);
  if (!status.ok()) return Annotate(status, absl::StrCat(path, ": safetensors header"));
  Sha256 sha;
  sha.Update(LengthBytes(json.size()));
  sha.Update(json);
  header.sha256 = sha.Finish();
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY));
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  const uint64_t file_size = info.st_size;
  char start[32];
  const size_t start_size = std::min<uint64_t>(file_size, sizeof(start));
  QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), 0, start, start_size, path));
  if (IsGitLfsPointer(absl::string_view(start, start_size))) return GitLfsPointerError(path);
  if (file_size < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a file of ", file_size, " bytes is no safetensors file"));
  }
  const uint64_t length = LengthFromBytes(start);
  if (length > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the first 8 bytes give a header of ", length, " bytes; the format allows ",
                                                   kMaxHeaderBytes, ". This is no safetensors file"));
  }
  if (length > file_size - kLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the header of ", length, " bytes does not fit the file of ", file_size, " bytes; it was cut off"));
  }
  std::string json(length, '\0');
  QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), kLengthBytes, json.data(), json.size(), path));
  return ParseSafetensorsHeader(json, file_size, path);
}

std::string BuildSafetensorsHeader(const std::vector<TensorInfo>& tensors) {
  std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
  size_t names = 0;
  for (const TensorInfo& tensor : tensors) names += tensor.name.size();
  constexpr size_t kBesideName = 96;  // what most entries need
  json.reserve(json.size() + names + kBesideName * tensors.size() + kHeaderAlignment);
  for (const TensorInfo& tensor : tensors) {
    json.push_back(',');
    AppendQuotedJson(tensor.name, &json);
    absl::StrAppend(&json, ":{\"dtype\":\"", DTypeName(tensor.dtype), "\",\"shape\":[");
    for (size_t i = 0; i < tensor.shape.size(); ++i) absl::StrAppend(&json, i > 0 ? "," : "", tensor.shape[i]);
    absl::StrAppend(&json, "],\"data_offsets\":[", tensor.begin, ",", tensor.end, "]}");
  }
  json.push_back('}');
  const uint64_t total = (kLengthBytes + json.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment;
  json.resize(total - kLengthBytes, ' ');
  return absl::StrCat(LengthBytes(json.size()), json);
}

}  // namespace quern::checkpoint
