// Sizes in bytes as people write them: "512MiB", "2GiB", "2GB", "1048576".
#ifndef QUERN_BASE_BYTE_SIZE_H_
#define QUERN_BASE_BYTE_SIZE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

// Accepts a decimal number, with a fraction if wanted, and a unit: none or B; KiB MiB GiB TiB (powers of 1024); kB KB MB GB TB
// (powers of 1000). Case of the unit is ignored, spaces before it allowed. INVALID_ARGUMENT names the text, with an example
// of a size, or says that it is too large: 2^63 bytes and more.
absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text);

// Three significant figures in binary units: "512 MiB", "1.07 GiB", "17 B".
std::string FormatByteSize(uint64_t bytes);

}  // namespace quern

#endif  // QUERN_BASE_BYTE_SIZE_H_
