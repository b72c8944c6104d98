// The tensors of a checkpoint as modules: where each weight lies (a tensor of its own, a slice of a stack of experts, a weight stored in a
// quantized format) and which tensors lie beside it.
#ifndef QUERN_DAEMON_PLANNER_SOURCE_MODULES_H_
#define QUERN_DAEMON_PLANNER_SOURCE_MODULES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/family.h"
#include "quant/scheme.h"

namespace quern::daemon {

// A region of a weight that is stored in a quantized format: rows of bytes in a tensor.
struct SourceRegion {
  std::string role;     // Region::suffix
  size_t tensor = 0;    // index into Checkpoint::tensors()
  uint64_t offset = 0;  // bytes from the tensor's begin
  uint64_t rows = 0;
  uint64_t row_bytes = 0;
  uint64_t row_stride = 0;
};

// A matrix of weights in the source. Element (r, c) of one that is stored as it is lies at offset + r*row_stride + c*col_stride.
struct SourceWeight {
  DType dtype = DType::kBF16;  // of the decoded weight
  uint64_t rows = 0, cols = 0;
  size_t tensor = 0;    // index into Checkpoint::tensors(); of the first region where there are regions
  uint64_t offset = 0;  // bytes from the tensor's begin
  uint64_t row_stride = 0, col_stride = 0;
  const quant::Scheme* decoder = nullptr;  // of a weight in a quantized format, else null
  std::vector<SourceRegion> regions;       // in the order of the decoder's, constant ones left out

  uint64_t elements() const { return rows * cols; }
  // Whether `dtype` may be any: its values are products that are rounded once, to what they are asked for in, as the libraries that read
  // the format do. Others have the dtype that compressed-tensors gives them.
  bool DecodesToAnyDType() const;
  uint64_t bytes() const;  // that reading it once takes
};

struct SourceModule {
  checkpoint::ModuleIdentity identity;  // of its weight, or of its first tensor
  std::optional<SourceWeight> weight;   // 2-D
  std::vector<size_t> tensors;          // beside the weight, or all of them: indices into Checkpoint::tensors()
  std::vector<size_t> storage;          // tensors that say how the weight is stored and are of no use without: scales, zero points
  std::optional<size_t> stack;          // the stack of experts that it is cut from: index into SourceModules::stacks
  std::string stack_tensor;             // name of that stack's module, which patterns may name too
  std::string unreadable;               // why a weight that is stored in a quantized format, or a stack, cannot be read; empty: it can
  bool is_stack = false;                // a stack of experts that cannot be cut
  bool described = false;               // has tensors, or is in a dtype, that only a weight in a quantized format has
};

// All experts of a layer where they are stored in common tensors.
struct SourceStack {
  std::vector<size_t> tensors;  // that hold the weights; tensors of how they are stored among them
  std::vector<size_t> modules;  // cut from them: indices into SourceModules::modules
  bool quantized = false;       // stored in a quantized format
};

struct SourceModules {
  std::vector<SourceModule> modules;  // in the order of their first tensors; those cut from stacks last
  std::vector<SourceStack> stacks;
  // Tensors beside plain weights that say how a weight in a quantized format is stored. In no module and no stack: whoever reads the result
  // would take them for a description of what lies beside them.
  std::vector<size_t> strays;
};

// INVALID_ARGUMENT when the source's quantization_config cannot be understood. A weight that cannot be read is no error here: see
// SourceModule::unreadable. Reads weight_shape tensors.
absl::StatusOr<SourceModules> GatherSourceModules(const checkpoint::Checkpoint& checkpoint);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SOURCE_MODULES_H_
