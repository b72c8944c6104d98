#include "base/worker_name.h"

#include "absl/strings/str_cat.h"
#include "base/utf8.h"

namespace quern {
namespace {

// Also the control characters above ASCII, U+0080 to U+009F.
bool IsForbidden(absl::string_view sequence) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(sequence[i]); };
  if (sequence.size() == 2) return byte(0) == 0xc2 && byte(1) < 0xa0;
  return sequence.size() == 1 && (byte(0) <= ' ' || byte(0) == 0x7f || byte(0) == '/');
}

}  // namespace

absl::Status CheckWorkerName(absl::string_view name) {
  if (name.empty()) return absl::InvalidArgumentError("the name of a worker is empty");
  if (name.size() > kMaxWorkerName) {
    return absl::InvalidArgumentError(absl::StrCat("the name of a worker has ", name.size(), " bytes, more than ", kMaxWorkerName));
  }
  for (size_t i = 0; i < name.size();) {
    const size_t length = Utf8SequenceLength(name, i);
    if (length == 0) return absl::InvalidArgumentError(absl::StrCat("the name of a worker is no UTF-8 at byte ", i));
    if (IsForbidden(name.substr(i, length))) {
      return absl::InvalidArgumentError(absl::StrCat("the name of a worker has a control character, a space or a slash at byte ", i));
    }
    i += length;
  }
  return absl::OkStatus();
}

}  // namespace quern
