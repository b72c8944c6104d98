// Tensors that several modules fill: which units make which of their bytes.
#ifndef QUERN_WORKER_PIPELINE_STACK_SLABS_H_
#define QUERN_WORKER_PIPELINE_STACK_SLABS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/v1/plan.pb.h"

namespace quern::worker {

// The least run of a stack's bytes that its units fill alone: one weight whose rows follow each other, or the weights of one expert that
// lie turned over, side by side or alternating. Such a slab consists of dense rows of `row_bytes`, each with one column of every weight.
struct StackSlab {
  size_t first = 0, count = 0;  // units
  uint64_t offset = 0;          // in the file
  uint64_t size = 0;
  uint64_t row_bytes = 0;  // 0: a weight as it is
};

// Slabs of one stack, in the order of the file. `units` all have a place and name one output. INVALID_ARGUMENT where they do not fill it,
// each byte once and in order, or in a way that is not known.
absl::StatusOr<std::vector<StackSlab>> CutIntoSlabs(absl::Span<const quern::v1::QuantizeUnit* const> units);

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_STACK_SLABS_H_
