// An index of arbitrary bytes: rejected, or of plain file names and written back as the same.
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "checkpoint/index.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using quern::checkpoint::ParseShardIndex;
  const auto index = ParseShardIndex(absl::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  if (!index.ok()) return 0;
  for (const auto& [tensor, file] : index->weight_map) {
    FUZZ_CHECK(!file.empty() && file != "." && file != ".." && file.find('/') == std::string::npos && file.find('\0') == std::string::npos);
  }
  const auto again = ParseShardIndex(BuildShardIndex(*index), "fuzz");
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(again->weight_map == index->weight_map);
  FUZZ_CHECK(again->total_size == index->total_size);
  FUZZ_CHECK(again->total_parameters == index->total_parameters);
  return 0;
}
