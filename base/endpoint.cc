#include "base/endpoint.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace quern {

absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text) {
  Endpoint endpoint;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    absl::ConsumePrefix(&rest, "//");
    if (!absl::StartsWith(rest, "/")) return absl::InvalidArgumentError(absl::StrCat(text, ": the path of a unix socket must be absolute"));
    endpoint.kind = Endpoint::Kind::kUnix;
    endpoint.path = std::string(rest);
    return endpoint;
  }
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon == absl::string_view::npos || text.find_first_not_of("0123456789", colon + 1) != absl::string_view::npos ||
      !absl::SimpleAtoi(text.substr(colon + 1), &port) || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(text, ": unix:/path or host:port is expected, with a port up to 65535"));
  }
  absl::string_view host = text.substr(0, colon);
  const bool brackets = absl::ConsumePrefix(&host, "[");
  if (brackets != absl::ConsumeSuffix(&host, "]") || (!brackets && absl::StrContains(host, ':'))) {
    return absl::InvalidArgumentError(absl::StrCat(text, ": an IPv6 address is written in brackets: [::1]:7450"));
  }
  // Whoever connects would take the address apart in another way.
  const auto belongs = [brackets](char c) { return absl::ascii_isalnum(c) || absl::StrContains(brackets ? ":.%-_" : ".-_", c); };
  if (!std::all_of(host.begin(), host.end(), belongs) || (brackets && host.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", absl::CHexEscape(text), "\": the host has characters that no name and no address has"));
  }
  endpoint.host = std::string(host);
  endpoint.port = static_cast<uint16_t>(port);
  if (host == "localhost" || host == "::1" ||
      (absl::StartsWith(host, "127.") && host.find_first_not_of("0123456789.") == absl::string_view::npos)) {
    endpoint.kind = Endpoint::Kind::kLoopback;
  }
  return endpoint;
}

absl::StatusOr<Endpoint> ParseServerAddress(absl::string_view text) {
  QUERN_ASSIGN_OR_RETURN(Endpoint endpoint, ParseEndpoint(text));
  if (endpoint.kind == Endpoint::Kind::kUnix) return endpoint;
  if (endpoint.host.empty()) return absl::InvalidArgumentError(absl::StrCat(text, ": the host is missing: host:port is expected"));
  if (endpoint.port == 0) return absl::InvalidArgumentError(absl::StrCat(text, ": nothing can be reached at port 0"));
  return endpoint;
}

}  // namespace quern
