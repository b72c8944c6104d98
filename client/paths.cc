#include "client/paths.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "client/exit_code.h"

namespace quern::client {

namespace {

// Nothing can be made at, or below, a link that leads nowhere.
absl::Status CheckNoDanglingLink(const std::filesystem::path& path) {
  std::filesystem::path part;
  for (const std::filesystem::path& component : path) {
    part /= component;
    std::error_code error;
    if (!std::filesystem::is_symlink(part, error) || std::filesystem::exists(part, error)) continue;
    const std::filesystem::path target = std::filesystem::read_symlink(part, error);
    return absl::InvalidArgumentError(absl::StrCat(EscapeUnlessUtf8(part.string()), " is a link to ", EscapeUnlessUtf8(target.string()),
                                                   ", which does not exist; make that directory or remove the link"));
  }
  return absl::OkStatus();
}

bool IsWithin(absl::string_view path, absl::string_view directory) {
  return path == directory || directory == "/" || absl::StartsWith(path, absl::StrCat(directory, "/"));
}

}  // namespace

absl::Status CheckApart(const std::string& source, const std::string& output) {
  // The name of a repository is none of a directory.
  if (!absl::StartsWith(source, "/") || (!IsWithin(source, output) && !IsWithin(output, source))) return absl::OkStatus();
  if (source == output) return absl::InvalidArgumentError(absl::StrCat("the output ", output, " is the source; choose another output"));
  return absl::InvalidArgumentError(
      IsWithin(output, source) ? absl::StrCat("the output ", output, " lies inside the source ", source, "; choose another output")
                               : absl::StrCat("the source ", source, " lies inside the output ", output, "; choose another output"));
}

absl::StatusOr<std::string> AbsolutePath(const std::string& path) {
  if (path.empty()) return UsageError("a path is empty");
  std::error_code error;
  const std::filesystem::path given = std::filesystem::absolute(path, error);
  QUERN_RETURN_IF_ERROR(CheckNoDanglingLink(given));
  const std::filesystem::path absolute = std::filesystem::weakly_canonical(given, error);
  if (error) return ErrnoToStatus(error.value(), "resolve", path);
  std::string text = absolute.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  // The argument was text; what a link or the working directory added may be other bytes.
  if (!IsValidUtf8(text)) return UsageError(absl::StrCat("the path \"", EscapeUnlessUtf8(text), "\" is no UTF-8"));
  return text;
}

bool IsRepositoryName(absl::string_view text) {
  const size_t at = text.find('@');
  const absl::string_view name = text.substr(0, at);
  if (at != absl::string_view::npos && at + 1 == text.size()) return false;
  const size_t slash = name.find('/');
  if (slash == absl::string_view::npos || slash == 0 || slash + 1 == name.size()) return false;
  if (name.find('/', slash + 1) != absl::string_view::npos) return false;
  const auto valid = [](absl::string_view part) {
    if (part.front() == '.' || part.front() == '-') return false;
    for (const char c : part) {
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '_' && c != '.') return false;
    }
    return true;
  };
  return valid(name.substr(0, slash)) && valid(name.substr(slash + 1));
}

absl::StatusOr<std::string> ExistingDirectory(const std::string& text) {
  if (text.empty()) return UsageError("the name of the directory is empty");
  std::error_code error;
  if (std::filesystem::is_directory(text, error)) return AbsolutePath(text);
  if (std::filesystem::exists(text, error)) return absl::InvalidArgumentError(absl::StrCat(text, " is no directory"));
  return absl::NotFoundError(absl::StrCat("there is no directory ", text));
}

absl::StatusOr<std::string> ResolveSource(const std::string& text, bool remote) {
  if (text.empty()) return UsageError("the source is empty");
  std::error_code error;
  if (std::filesystem::is_directory(text, error)) return AbsolutePath(text);
  if (std::filesystem::exists(text, error)) {
    return absl::InvalidArgumentError(absl::StrCat(text, " is no directory; give the directory that holds the checkpoint"));
  }
  if (IsRepositoryName(text)) return text;
  if (remote && absl::StartsWith(text, "/")) return text;
  return absl::NotFoundError(absl::StrCat("there is no directory ", text, ", and it is no name of the form org/name[@revision] either"));
}

absl::StatusOr<std::string> ResolveFile(absl::string_view option, const std::string& text, bool remote) {
  std::error_code error;
  if (std::filesystem::is_regular_file(text, error)) return AbsolutePath(text);
  if (remote && absl::StartsWith(text, "/") && !std::filesystem::exists(text, error)) return text;
  return UsageError(absl::StrCat(option, ": there is no file ", text));
}

}  // namespace quern::client
