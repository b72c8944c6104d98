#ifndef QUERN_QUANT_NUMERICS_VERSION_H_
#define QUERN_QUANT_NUMERICS_VERSION_H_

#include <cstdint>

namespace quern::quant {

// Grows with every change that alters a byte or an error figure of any output. A job pins it.
inline constexpr uint64_t kNumericsVersion = 3;

}  // namespace quern::quant

#endif  // QUERN_QUANT_NUMERICS_VERSION_H_
