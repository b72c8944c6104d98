// Bearer tokens and what their owners may do.
//
// The file has one token a line: NAME ROLES TOKEN, separated by blanks. Empty lines and lines that begin with '#' are skipped.
//   NAME   for the audit log: letters, digits, '.', '_', '-', '@'; up to 64
//   ROLES  read, submit, worker, admin, joined by commas
//   TOKEN  the token itself, 32 to 256 of A-Z a-z 0-9 - . _ ~ + / =; or sha256: and the 64 hexadecimal digits of its SHA-256
#ifndef QUERN_DAEMON_RPC_TOKEN_FILE_H_
#define QUERN_DAEMON_RPC_TOKEN_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/rpc/method_roles.h"

namespace quern::daemon {

struct Token {
  std::string name;
  RoleSet roles = 0;
  std::string sha256;  // raw; the token itself is not kept
};

// Immutable.
class TokenTable {
 public:
  // Errors name the line and never quote it.
  static absl::StatusOr<TokenTable> Parse(absl::string_view text, absl::string_view path);
  // FAILED_PRECONDITION when others than the file's owner and group could read or replace it. Blocks.
  static absl::StatusOr<TokenTable> Read(const std::string& path);

  // nullptr: nobody's. Takes the same time for all of one length.
  const Token* Find(absl::string_view token) const;
  const std::vector<Token>& tokens() const { return tokens_; }

 private:
  std::vector<Token> tokens_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_TOKEN_FILE_H_
