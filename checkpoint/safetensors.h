// The header of a safetensors file, read as hostile input and written back.
//
// File: u64 little-endian N, N bytes of JSON, data. The JSON maps tensor name -> {dtype, shape, data_offsets: [begin, end)}, offsets
// relative to the data's start, plus an optional "__metadata__" of string to string. Ranges cover the data without holes or overlaps
// and the last end is the file's size.
#ifndef QUERN_CHECKPOINT_SAFETENSORS_H_
#define QUERN_CHECKPOINT_SAFETENSORS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"

namespace quern::checkpoint {

struct TensorInfo {
  std::string name;
  DType dtype;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // relative to the data's start, in bytes
  uint64_t end = 0;

  uint64_t bytes() const { return end - begin; }
  uint64_t elements() const;
};

struct SafetensorsHeader {
  uint64_t data_start = 0;          // 8 + N
  std::string sha256;               // raw, of the 8 length bytes and the JSON
  std::vector<TensorInfo> tensors;  // ascending by begin
  std::vector<std::pair<std::string, std::string>> metadata;
};

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

// `json` is the N bytes after the length. Everything is checked against `file_size` before it is believed: dtype, shape times width
// without overflow, ranges, duplicates, holes. INVALID_ARGUMENT names `path`, the tensor and the offset.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json, uint64_t file_size, absl::string_view path);

// Opens `path`, reads the header and nothing else. A Git-LFS pointer is told as such.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path);

// Length bytes and JSON for tensors given in file order with begin/end set, "__metadata__" {"format":"pt"}, padded with spaces so
// that the result's size is a multiple of 4096.
std::string BuildSafetensorsHeader(const std::vector<TensorInfo>& tensors);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_SAFETENSORS_H_
