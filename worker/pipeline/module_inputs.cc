#include "worker/pipeline/module_inputs.h"

#include <string.h>

#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "worker/pipeline/weight_reader.h"

namespace quern::worker {

absl::StatusOr<std::shared_ptr<const LoadedInputs>> LoadedInputs::Start(TaskContext& context, const quern::v1::QuantizeUnit& unit,
                                                                        const quant::Scheme& scheme, int64_t cols, bool all) {
  const std::string what = absl::StrCat("module ", unit.module());
  auto loaded = std::make_shared<LoadedInputs>();
  if (unit.has_activation_amax()) {
    if (!std::isfinite(unit.activation_amax()) || unit.activation_amax() < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": the largest magnitude of its activations is given as ", unit.activation_amax()));
    }
    loaded->inputs_.activation_amax = unit.activation_amax();
  } else if (all && scheme.NeedsActivationAmax()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": its scheme needs the largest magnitude of its activations"));
  }
  if (unit.inputs_size() == 0) {
    if (all && scheme.NeedsImportance())
      return absl::InvalidArgumentError(absl::StrCat(what, ": its scheme needs the importance of its columns"));
    return loaded;
  }
  const quern::v1::DecodeInput& input = unit.inputs(0);
  if (unit.inputs_size() > 1 || input.role() != "importance") {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the input ", unit.inputs(unit.inputs_size() - 1).role(), " is not known, only one importance"));
  }
  QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<WeightReader> reader, WeightReader::For(input.view(), context.sources()));
  if (reader->dtype() != DType::kF32 || !reader->contiguous() || reader->shape().rows != 1 || reader->shape().cols != cols) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": its importance (", reader->What(), ") must be F32 [1, ", cols, "], one value a column"));
  }
  const uint64_t offset = reader->OffsetOf(0, 0);
  const uint64_t size = static_cast<uint64_t>(cols) * sizeof(float);
  const uint64_t memory = BufferFor(offset, size);
  if (memory > context.held().largest()) {
    return WithFailure(absl::ResourceExhaustedError(absl::StrCat(what, ": the importance of its columns takes ", memory,
                                                                 " bytes and does not fit: give the worker more --memory")),
                       quern::v1::MEMORY_TOO_SMALL, InputsMemory(memory));
  }
  std::optional<PoolBuffer> held;
  QUERN_RETURN_IF_ERROR(context.engine().WaitUntil([&](absl::Duration timeout) {
    held = context.held().Acquire(memory, timeout);
    return held.has_value();
  }));
  loaded->memory_ = *std::move(held);
  std::byte* const buffer = loaded->memory_.data();
  // Moved to the front of the buffer, where it is aligned.
  loaded->inputs_.importance = {reinterpret_cast<const float*>(buffer), static_cast<size_t>(cols)};
  const auto gate = std::make_shared<Gate>();
  loaded->awaits_.push_back(gate);
  auto step = std::make_unique<Step>();
  step->what = absl::StrCat("tensor ", reader->tensor());
  step->reads.push_back({reader->file(), offset, size, buffer, nullptr});
  step->holds = gate;
  step->compute = [loaded, reader, buffer, offset, size](Step::Done done) {
    memmove(buffer, buffer + offset % kIoBlock, size);
    for (size_t i = 0; i < loaded->inputs_.importance.size(); ++i) {
      const float value = loaded->inputs_.importance[i];
      if (std::isfinite(value) && value >= 0) continue;
      done(absl::InvalidArgumentError(absl::StrCat(reader->path(), ": the importance of column ", i, " is ", value)));
      return;
    }
    done(absl::OkStatus());
  };
  QUERN_RETURN_IF_ERROR(context.engine().Start(std::move(step)));
  return loaded;
}

}  // namespace quern::worker
