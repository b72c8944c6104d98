#include "base/secret_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace quern {
namespace {

constexpr uint64_t kLargestFile = uint64_t{1} << 20;
constexpr size_t kShortestToken = 32;  // 128 bits as hexadecimal digits
constexpr size_t kLongestToken = 256;
constexpr mode_t kForbidden = S_IWGRP | S_IRWXO;

int64_t Nanoseconds(const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

}  // namespace

absl::StatusOr<std::string> ReadSecretFile(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY));
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoToStatus(errno, "stat", path);
  if ((info.st_mode & kForbidden) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s holds a secret, and its mode %04o lets others read or replace it: chmod 600 %s", path,
                        static_cast<unsigned>(info.st_mode & 07777), path));
  }
  if (static_cast<uint64_t>(info.st_size) > kLargestFile) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", info.st_size, " bytes, which is too many for tokens or a key"));
  }
  std::string content(info.st_size, '\0');
  QUERN_RETURN_IF_ERROR(ReadExactly(fd.get(), 0, content.data(), content.size(), path));
  return content;
}

bool IsToken(absl::string_view text) {
  return text.size() >= kShortestToken && text.size() <= kLongestToken && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isalnum(c) || absl::string_view("-._~+/=").find(c) != absl::string_view::npos;
         });
}

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(const std::string content, ReadSecretFile(path));
  const absl::string_view token = absl::StripAsciiWhitespace(content);
  if (IsToken(token)) return std::string(token);
  return absl::InvalidArgumentError(absl::StrCat(path, " holds no token: one word of ", kShortestToken, " to ", kLongestToken,
                                                 " letters, digits and -._~+/= is expected, such as openssl rand -hex 32 makes"));
}

FileVersion VersionOf(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return {};
  return {.device = info.st_dev,
          .inode = info.st_ino,
          .size = static_cast<uint64_t>(info.st_size),
          .modified_ns = Nanoseconds(info.st_mtim),
          .changed_ns = Nanoseconds(info.st_ctim)};
}

}  // namespace quern
