// Paths as the coordinator wants them: absolute.
#ifndef QUERN_CLIENT_PATHS_H_
#define QUERN_CLIENT_PATHS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::client {

// Absolute, without "." and "..", links followed as far as the path exists. UsageError when it is empty or that is
// no UTF-8, INVALID_ARGUMENT when a part of it is a link to something that does not exist.
absl::StatusOr<std::string> AbsolutePath(const std::string& path);

// INVALID_ARGUMENT when one of these real paths is the other or lies inside it. A source that is the name of a repository passes.
absl::Status CheckApart(const std::string& source, const std::string& output);

// The absolute path of a directory that is there. NOT_FOUND or INVALID_ARGUMENT otherwise.
absl::StatusOr<std::string> ExistingDirectory(const std::string& text);

// True for "org/name" and "org/name@revision" as Hugging Face spells them.
bool IsRepositoryName(absl::string_view text);

// What to send for a source: the absolute path when `text` is a directory here, else `text` when it names a repository, which the
// coordinator looks up in its Hugging Face cache. NOT_FOUND otherwise, except for an absolute path with `remote`: that directory may exist
// where the coordinator runs.
absl::StatusOr<std::string> ResolveSource(const std::string& text, bool remote);

// The absolute path of a file that the coordinator is to read. UsageError naming `option` when it is no file here, except for an absolute
// path with `remote`, as above.
absl::StatusOr<std::string> ResolveFile(absl::string_view option, const std::string& text, bool remote);

}  // namespace quern::client

#endif  // QUERN_CLIENT_PATHS_H_
