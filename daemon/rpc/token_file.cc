#include "daemon/rpc/token_file.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/digest.h"
#include "base/secret_file.h"
#include "base/status_macros.h"

namespace quern::daemon {
namespace {

constexpr size_t kLongestName = 64;

bool IsName(absl::string_view name) {
  return !name.empty() && name.size() <= kLongestName && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(c) || absl::string_view("._-@").find(c) != absl::string_view::npos;
  });
}

// Raw bytes of the digest that `text` holds or that it has itself; empty when it is no token.
std::string DigestOf(absl::string_view text) {
  if (!absl::ConsumePrefix(&text, "sha256:")) return IsToken(text) ? Sha256Of(text) : "";
  const bool digits = text.size() == 2 * Sha256::kSize && std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
  return digits ? absl::HexStringToBytes(text) : "";
}

absl::StatusOr<Token> ParseLine(absl::string_view line) {
  const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  if (words.size() != 3) return absl::InvalidArgumentError("three words are expected: NAME ROLES TOKEN");
  Token token;
  token.name = std::string(words[0]);
  if (!IsName(token.name)) {
    return absl::InvalidArgumentError("the first word is the token's name: up to 64 letters, digits and the characters . _ - @");
  }
  for (const absl::string_view name : absl::StrSplit(words[1], ',')) {
    const std::optional<Role> role = ParseRole(name);
    if (!role.has_value()) {
      return absl::InvalidArgumentError(
          "the second word is a list of roles, such as read,submit: known are read, submit, worker and admin");
    }
    token.roles |= RolesOf(*role);
  }
  token.sha256 = DigestOf(words[2]);
  if (token.sha256.empty()) {
    return absl::InvalidArgumentError(
        "the third word is no token: 32 to 256 letters, digits and -._~+/= are expected (openssl rand -hex 32), or sha256: and 64 "
        "hexadecimal digits");
  }
  return token;
}

}  // namespace

absl::StatusOr<TokenTable> TokenTable::Parse(absl::string_view text, absl::string_view path) {
  TokenTable table;
  std::set<std::string> names, digests;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || absl::StartsWith(line, "#")) continue;
    absl::StatusOr<Token> token = ParseLine(line);
    if (!token.ok()) return Annotate(token.status(), absl::StrCat(path, ", line ", number));
    if (!names.insert(token->name).second || !digests.insert(token->sha256).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ", line ", number, ": its name or its token stands in a line before"));
    }
    table.tokens_.push_back(*std::move(token));
  }
  if (table.tokens_.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " holds no token: each line is NAME ROLES TOKEN, for example: ci submit $(openssl rand -hex 32)"));
  }
  return table;
}

absl::StatusOr<TokenTable> TokenTable::Read(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, ReadSecretFile(path));
  return Parse(text, path);
}

const Token* TokenTable::Find(absl::string_view token) const {
  const std::string digest = Sha256Of(token);
  const Token* found = nullptr;
  // All of them, so that the time does not tell which one it was.
  for (const Token& known : tokens_) {
    if (CRYPTO_memcmp(known.sha256.data(), digest.data(), Sha256::kSize) == 0) found = &known;
  }
  return found;
}

}  // namespace quern::daemon
