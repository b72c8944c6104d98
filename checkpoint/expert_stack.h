// Tensors that hold the weights of all experts of a layer, and where in them one expert's matrices lie.
#ifndef QUERN_CHECKPOINT_EXPERT_STACK_H_
#define QUERN_CHECKPOINT_EXPERT_STACK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/model_config.h"

namespace quern::checkpoint {

// What one tensor holds: said by the family of the model, never by the shape alone.
struct ExpertStack {
  enum class Holds { kGateUp, kGate, kUp, kDown };
  enum class Form {
    kValues,  // [E, out, in] or [E, in, out]
    kBlocks,  // MXFP4: U8 [E, out, in/32, 16]
    kScales,  // MXFP4: U8 [E, out, in/32], the exponents of the blocks
    kBias,    // [E, out]
  };

  std::string experts;  // "model.layers.3.mlp.experts": expert e's modules are "<experts>.<e>.<name>"
  std::string tensor;   // the tensor's name
  std::string base;     // the tensor's name without ".weight" and without what tells its form: the same for blocks and scales
  Holds holds = Holds::kGateUp;
  Form form = Form::kValues;
  bool transposed = false;
  bool fixed = false;
  bool interleaved = false;
  std::vector<std::string> names;  // of the modules that an expert has in this tensor: {"gate_proj", "up_proj"} or one
};

// The axes of a stack.
struct StackAxes {
  uint64_t experts = 0;
  uint64_t out = 0;  // of the whole tensor: twice an expert's intermediate size where it holds gate and up
  uint64_t in = 0;
  bool transposed = false;  // stored [E, in, out]
  bool certain = false;     // nothing else fits; else the family decided

  // The same tensor read the other way.
  StackAxes Turned() const { return {experts, in, out, !transposed, certain}; }
};

// From the last two dimensions and the sizes in config.json; where they fit both ways, or the config has no sizes, the family decides. Only
// one of an expert's stacks can fit both ways (hidden size and intermediate size are equal, or one is twice the other), so that its sibling
// tells more than the family: see `certain`.
// INVALID_ARGUMENT says what does not fit. The shape has three dimensions, or those of the form.
absl::StatusOr<StackAxes> ResolveStackAxes(const ExpertStack& stack, const std::vector<uint64_t>& shape, const ModelConfig& config);

// A matrix [rows, cols] inside a stack: element (r, c) is element first + r*row_stride + c*col_stride of the tensor.
struct StackSlice {
  uint64_t rows = 0, cols = 0;
  uint64_t first = 0;
  uint64_t row_stride = 0, col_stride = 0;
};

// Module number `part` (of ExpertStack::names) of one expert.
StackSlice SliceOfStack(const ExpertStack& stack, const StackAxes& axes, uint64_t expert, size_t part);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_EXPERT_STACK_H_
