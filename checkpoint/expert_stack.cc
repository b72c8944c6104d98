#include "checkpoint/expert_stack.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace quern::checkpoint {
namespace {

constexpr uint64_t kMxGroup = 32;

}  // namespace

absl::StatusOr<StackAxes> ResolveStackAxes(const ExpertStack& stack, const std::vector<uint64_t>& shape, const ModelConfig& config) {
  const bool gate_up = stack.holds == ExpertStack::Holds::kGateUp;
  const auto invalid = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("a stack of experts of shape [", absl::StrJoin(shape, ", "), "]: ", why));
  };
  StackAxes axes;
  uint64_t a = 0, b = 0;  // the dimensions behind that of the experts
  if (stack.form == ExpertStack::Form::kBlocks) {
    if (shape.size() != 4 || shape[3] != kMxGroup / 2 || shape[2] > UINT64_MAX / kMxGroup)
      return invalid("expected [experts, out, in/32, 16]");
    a = shape[1];
    b = shape[2] * kMxGroup;
  } else {
    if (shape.size() != 3) return invalid("expected three dimensions");
    a = shape[1];
    b = shape[2];
  }
  axes.experts = shape[0];
  if (axes.experts == 0 || a == 0 || b == 0) return invalid("it is empty");
  std::optional<uint64_t> hidden = config.hidden_size, wide = config.moe_intermediate_size;
  if (wide.has_value() && gate_up) wide = *wide * 2;
  const std::optional<uint64_t>& out = stack.holds == ExpertStack::Holds::kDown ? hidden : wide;
  const std::optional<uint64_t>& in = stack.holds == ExpertStack::Holds::kDown ? wide : hidden;
  axes.transposed = stack.transposed;
  axes.certain = stack.fixed;
  if (out.has_value() && in.has_value()) {
    const bool straight = a == *out && b == *in, turned = a == *in && b == *out;
    const bool fits = stack.fixed ? (stack.transposed ? turned : straight) : straight || turned;
    if (!fits) {
      return invalid(absl::StrCat("with hidden_size ", *hidden, " and moe_intermediate_size ", *config.moe_intermediate_size,
                                  " of config.json, [experts, ", stack.fixed && stack.transposed ? *in : *out, ", ",
                                  stack.fixed && stack.transposed ? *out : *in, "] is expected"));
    }
    if (!stack.fixed && straight != turned) {
      axes.transposed = turned;
      axes.certain = true;
    }
  }
  axes.out = axes.transposed ? b : a;
  axes.in = axes.transposed ? a : b;
  if (gate_up && axes.out % 2 != 0) return invalid(absl::StrCat(axes.out, " rows of gate and up cannot be halved"));
  return axes;
}

StackSlice SliceOfStack(const ExpertStack& stack, const StackAxes& axes, uint64_t expert, size_t part) {
  const bool gate_up = stack.holds == ExpertStack::Holds::kGateUp;
  StackSlice slice;
  slice.rows = gate_up ? axes.out / 2 : axes.out;
  slice.cols = axes.in;
  const uint64_t out_stride = axes.transposed ? 1 : axes.in;
  const uint64_t in_stride = axes.transposed ? axes.out : 1;
  const uint64_t step = gate_up && stack.interleaved ? 2 : 1;
  const uint64_t begin = part == 0 ? 0 : (stack.interleaved ? 1 : slice.rows);
  slice.first = expert * axes.out * axes.in + begin * out_stride;
  slice.row_stride = step * out_stride;
  slice.col_stride = in_stride;
  return slice;
}

}  // namespace quern::checkpoint
