// What --json prints: messages of the wire protocol in protobuf's JSON form, with the field names of the .proto files and every scalar
// field present. 64-bit integers are strings and bytes are base64, as that form has them.
#ifndef QUERN_CLIENT_JSON_OUTPUT_H_
#define QUERN_CLIENT_JSON_OUTPUT_H_

#include <google/protobuf/message.h>

#include <string>

#include "absl/status/status.h"

namespace quern::client {

// Indented, with a newline at the end.
std::string ToJson(const google::protobuf::Message& message);

// {"error": {"code": "NOT_FOUND", "message": "..."}}, with a newline at the end.
std::string ErrorJson(const absl::Status& status);

}  // namespace quern::client

#endif  // QUERN_CLIENT_JSON_OUTPUT_H_
