// A header of arbitrary bytes: rejected, or within its file and written back as the same tensors. The first four bytes of the input are the
// size of the data, the rest is the header's JSON.
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "checkpoint/safetensors.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using quern::checkpoint::ParseSafetensorsHeader;
  using quern::checkpoint::TensorInfo;
  if (size < 4) return 0;
  uint64_t data_size = 0;
  for (int i = 0; i < 4; ++i) data_size |= uint64_t{data[i]} << (8 * i);
  const absl::string_view json(reinterpret_cast<const char*>(data) + 4, size - 4);
  const auto header = ParseSafetensorsHeader(json, 8 + json.size() + data_size, "fuzz");
  if (!header.ok()) return 0;
  uint64_t covered = 0;
  for (const TensorInfo& tensor : header->tensors) {
    FUZZ_CHECK(tensor.begin == covered);
    FUZZ_CHECK(tensor.elements() * quern::BitsPerElement(tensor.dtype) == tensor.bytes() * 8);
    covered = tensor.end;
  }
  FUZZ_CHECK(covered == data_size);

  const std::string written = quern::checkpoint::BuildSafetensorsHeader(header->tensors);
  FUZZ_CHECK(written.size() % 4096 == 0);
  const auto again = ParseSafetensorsHeader(absl::string_view(written).substr(8), written.size() + data_size, "fuzz");
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(again->tensors.size() == header->tensors.size());
  for (size_t i = 0; i < again->tensors.size(); ++i) {
    FUZZ_CHECK(again->tensors[i].name == header->tensors[i].name);
    FUZZ_CHECK(again->tensors[i].dtype == header->tensors[i].dtype);
    FUZZ_CHECK(again->tensors[i].shape == header->tensors[i].shape);
    FUZZ_CHECK(again->tensors[i].begin == header->tensors[i].begin);
  }
  return 0;
}
