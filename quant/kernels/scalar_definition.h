// A switch for tests: all kernels of this room give way to the scalar definition, so that whole schemes can be compared with it.
#ifndef QUERN_QUANT_KERNELS_SCALAR_DEFINITION_H_
#define QUERN_QUANT_KERNELS_SCALAR_DEFINITION_H_

#include <atomic>

namespace quern::quant {

inline std::atomic<bool> scalar_definition_for_test = false;

inline bool UsesScalarDefinition() { return scalar_definition_for_test.load(std::memory_order_relaxed); }

}  // namespace quern::quant

#endif  // QUERN_QUANT_KERNELS_SCALAR_DEFINITION_H_
