// How GoogleTest prints messages in failures. Its own printer joins strings in a way that g++ 12 takes for overlapping memory
// (-Wrestrict, a false alarm) at -O2 and above. For tests that give messages to matchers.
#ifndef QUERN_PROTO_QUERN_V1_TEST_PRINTER_H_
#define QUERN_PROTO_QUERN_V1_TEST_PRINTER_H_

#include <google/protobuf/message.h>

#include <concepts>
#include <ostream>

namespace quern::v1 {

template <typename T>
requires std::derived_from<T, google::protobuf::Message>
void PrintTo(const T& message, std::ostream* out) { *out << "(" << message.ShortDebugString() << ")"; }

}  // namespace quern::v1

#endif  // QUERN_PROTO_QUERN_V1_TEST_PRINTER_H_
