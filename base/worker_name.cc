#include "base/worker_name.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/text_check.h"
#include "base/utf8.h"

namespace quern {

absl::Status CheckWorkerName(absl::string_view name) {
  if (name.empty()) return absl::InvalidArgumentError("the name of a worker is empty");
  if (name.size() > kMaxWorkerName) {
    return absl::InvalidArgumentError(absl::StrCat("the name of a worker has ", name.size(), " bytes, more than ", kMaxWorkerName));
  }
  for (size_t i = 0; i < name.size();) {
    const size_t length = Utf8SequenceLength(name, i);
    if (length == 0) return absl::InvalidArgumentError(absl::StrCat("the name of a worker is no UTF-8 at byte ", i));
    i += length;
  }
  // In a path of a web service they would name something else.
  if (name == "." || name == "..") return absl::InvalidArgumentError(absl::StrCat("a worker cannot have the name ", name));
  if (const size_t at = std::min(FindInvisible(name), name.find('/')); at != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of a worker has a space, a slash, or a character that controls the text or does not show, at byte ", at));
  }
  return absl::OkStatus();
}

}  // namespace quern
