// What lets a data connection in.
//
// A client calls the coordinator by gRPC, where tokens and roles are judged, and gets a ticket, good for one connection and a short time.
// The connection goes to the same address. Its first bytes, the greeting, tell it from those of gRPC and say which ticket it has, without
// telling the ticket: they are not encrypted. TLS follows if the address speaks it, then the ticket itself.
#ifndef QUERN_BASE_LINK_TICKET_H_
#define QUERN_BASE_LINK_TICKET_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace quern {

// Of a ticket: 32 random bytes in hexadecimal digits.
inline constexpr size_t kTicketSize = 64;
// "quern-data/1 ", the name of the ticket, a line feed.
inline constexpr size_t kGreetingSize = 13 + 32 + 1;

std::string NewTicket();
// Half of its SHA-256, in hexadecimal digits.
std::string NameOfTicket(absl::string_view ticket);
std::string Greeting(absl::string_view ticket);

enum class Opening { kOther, kTooShort, kGreeting };
// What the bytes that have come over a new connection are.
Opening JudgeOpening(absl::string_view bytes);
// The name of the ticket in a whole greeting.
absl::string_view TicketNameIn(absl::string_view greeting);

}  // namespace quern

#endif  // QUERN_BASE_LINK_TICKET_H_
