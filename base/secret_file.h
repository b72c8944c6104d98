// Files that hold a secret: tokens and private keys.
#ifndef QUERN_BASE_SECRET_FILE_H_
#define QUERN_BASE_SECRET_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern {

// The content. FAILED_PRECONDITION when others than the file's owner and group may read it, or others than its owner write it. Follows
// links. Messages never quote the content. Blocks.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path);

// One token, alone in its file: 32 to 256 of A-Z a-z 0-9 - . _ ~ + / =, with blanks and line ends around it. Of a file as above.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);
// Whether `text` has the form of a token.
bool IsToken(absl::string_view text);

// What tells a file from the one that was there before under its name, also behind links.
struct FileVersion {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size = 0;
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;
  bool operator==(const FileVersion&) const = default;
};
// All zero when there is none.
FileVersion VersionOf(const std::string& path);

}  // namespace quern

#endif  // QUERN_BASE_SECRET_FILE_H_
