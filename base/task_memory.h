// How the buffer pool of a task is divided: shared by the planner, which prints the least pool a task needs, and the pipeline, which lives
// in it.
#ifndef QUERN_BASE_TASK_MEMORY_H_
#define QUERN_BASE_TASK_MEMORY_H_

#include <cstdint>
#include <string>

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

// The least pool for a task with a tile of so many bytes that cannot be cut: whole rows that a search looks at together, with what they are
// decoded from. The pipeline gives each tile up to 1/16 of that pool, and the codes of one up to half of what the tile takes.
inline constexpr uint64_t TileMemory(uint64_t bytes) {
  constexpr uint64_t kBlock = 4096;
  const uint64_t memory = 16 * ((bytes + kBlock - 1) / kBlock * kBlock);
  return memory < kMinimumTaskMemory ? kMinimumTaskMemory : memory;
}

// What a tile takes beside the bytes of its rows: blocks of direct I/O at both ends, scales.
inline constexpr uint64_t TileOf(uint64_t row_bytes) { return row_bytes + row_bytes / 64 + 16 * kKiB; }

// The least pool for a task that holds the inputs of a module, so many bytes.
inline constexpr uint64_t InputsMemory(uint64_t bytes) {
  return kSideTensorShare * (bytes + 8 * kKiB) < kMinimumTaskMemory ? kMinimumTaskMemory : kSideTensorShare * (bytes + 8 * kKiB);
}

// A least pool for people who type it back: whole MiB, rounded up ("1187 MiB").
std::string FormatLeastMemory(uint64_t bytes);

}  // namespace quern

#endif  // QUERN_BASE_TASK_MEMORY_H_
