#include "client/json_output.h"

#include <google/protobuf/util/json_util.h>

#include <nlohmann/json.hpp>

namespace quern::client {

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return ErrorJson(absl::InternalError(status.ToString()));
  return text;
}

std::string ErrorJson(const absl::Status& status) {
  const nlohmann::ordered_json json = {
      {"error", {{"code", absl::StatusCodeToString(status.code())}, {"message", std::string(status.message())}}}};
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace quern::client
