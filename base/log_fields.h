// Lines of a log as key=value, the same in every program:
//   attempt event=ended job=jobs/1 task=24 attempt=2 worker=node7 state=FAILED reason=IO_ERROR message="cannot read /x: ..."
// What such a line is about comes first, as words of its own.
#ifndef QUERN_BASE_LOG_FIELDS_H_
#define QUERN_BASE_LOG_FIELDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace quern {

inline constexpr size_t kLongestLogValue = 200;     // that strangers can cause
inline constexpr size_t kLongestLogMessage = 2000;  // of errors, with paths

// A value in a line of key=value: as it is when it is plain, else quoted and escaped, so that nobody can write lines or keys of his own.
// Longer ones are cut, with "..." behind.
std::string LogValue(absl::string_view value, size_t longest = kLongestLogValue);

// "job=jobs/1 task=24 attempt=2", and without the last. `job` is the resource name.
std::string AttemptFields(absl::string_view job, uint32_t task, uint32_t attempt);
std::string TaskFields(absl::string_view job, uint32_t task);

// " message=..." in full length; empty for an empty one.
std::string MessageField(absl::string_view message);

// The pairs of a line, in order, unquoted. Words between them are no pairs and are left out.
std::vector<std::pair<std::string, std::string>> ParseLogFields(absl::string_view line);

}  // namespace quern

#endif  // QUERN_BASE_LOG_FIELDS_H_
