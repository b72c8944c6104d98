#include "base/link/ticket.h"

#include <sys/random.h>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/digest.h"

namespace quern {
namespace {

constexpr absl::string_view kMagic = "quern-data/1 ";
constexpr size_t kNameSize = 32;

}  // namespace

std::string NewTicket() {
  std::string bytes(kTicketSize / 2, '\0');
  for (size_t have = 0; have < bytes.size();) {
    const ssize_t n = getrandom(bytes.data() + have, bytes.size() - have, 0);
    if (n > 0) have += n;
  }
  return absl::BytesToHexString(bytes);
}

std::string NameOfTicket(absl::string_view ticket) { return HexDigest(Sha256Of(ticket)).substr(0, kNameSize); }

std::string Greeting(absl::string_view ticket) { return absl::StrCat(kMagic, NameOfTicket(ticket), "\n"); }

Opening JudgeOpening(absl::string_view bytes) {
  if (!absl::StartsWith(bytes, kMagic.substr(0, bytes.size()))) return Opening::kOther;
  return bytes.size() < kGreetingSize ? Opening::kTooShort : Opening::kGreeting;
}

absl::string_view TicketNameIn(absl::string_view greeting) { return greeting.substr(kMagic.size(), kNameSize); }

}  // namespace quern
