// Names of modules as dotted components, some of which are numbers: their natural order, and short texts for many of them.
#ifndef QUERN_DAEMON_PLANNER_MODULE_NAMES_H_
#define QUERN_DAEMON_PLANNER_MODULE_NAMES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace quern::daemon {

// Whether a component is a number of at most 9 digits without leading zeros.
bool IsNumber(absl::string_view component);

// A text whose byte order is the natural order of names: "layers.2" before "layers.10".
std::string NaturalKey(absl::string_view name);

// The name with every number replaced by "#": "model.layers.#.mlp.up_proj".
std::string NameTemplate(absl::string_view name);

// Lines that stand for all of `names`: names that differ in their numbers only share one, with the numbers as ranges and how many names it
// stands for: "model.layers.{0-3,7}.mlp.up_proj (5 modules)". In the order of the first of each.
std::vector<std::string> SummarizeNames(const std::vector<std::string>& names);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_MODULE_NAMES_H_
