// Shapes as errors and reports print them: [2, 3].
#ifndef QUERN_DAEMON_PLANNER_SHAPE_TEXT_H_
#define QUERN_DAEMON_PLANNER_SHAPE_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/safetensors.h"

namespace quern::daemon {

inline std::string ShapeText(const std::vector<uint64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }
inline std::string ShapeText(const checkpoint::TensorInfo& info) { return ShapeText(info.shape); }

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SHAPE_TEXT_H_
