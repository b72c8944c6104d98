// How the buffer pool of a task is divided: shared by the planner, which prints the least pool a task needs, and the pipeline, which lives
// in it.
#ifndef QUERN_BASE_TASK_MEMORY_H_
#define QUERN_BASE_TASK_MEMORY_H_

#include <cstdint>

#include "base/byte_size.h"

namespace quern {

// The least buffer pool of any task. Rows that do not fit are read in column segments, side tensors that do not fit are written in place,
// so that few weights need more: see below.
inline constexpr uint64_t kMinimumTaskMemory = 16 * kMiB;

// Side tensors (scales, zero points) of one module are held in memory up to this part of the pool until their turn in the file.
inline constexpr uint64_t kSideTensorShare = 8;  // 1/8

// A weight whose columns are not contiguous is gathered in memory, so many rows at once as its scheme takes together: the least pool for a
// task that gathers rows of so many bytes. The pipeline gives at least 1/8 of the pool to them.
inline constexpr uint64_t GatherMemory(uint64_t bytes) {
  return 8 * (bytes + 64 * kKiB) < kMinimumTaskMemory ? kMinimumTaskMemory : 8 * (bytes + 64 * kKiB);
}

// The least pool for a task whose scheme looks at whole rows and takes so many bytes of them together, decoded if they are stored encoded.
// A tile is at most 1/16 of the pool, and what is read and written beside the rows is less than they are.
inline constexpr uint64_t WholeRowsMemory(uint64_t bytes) { return 32 * bytes < kMinimumTaskMemory ? kMinimumTaskMemory : 32 * bytes; }

// The least pool for a task that holds the inputs of a module, so many bytes.
inline constexpr uint64_t InputsMemory(uint64_t bytes) {
  return kSideTensorShare * (bytes + 8 * kKiB) < kMinimumTaskMemory ? kMinimumTaskMemory : kSideTensorShare * (bytes + 8 * kKiB);
}

}  // namespace quern

#endif  // QUERN_BASE_TASK_MEMORY_H_
