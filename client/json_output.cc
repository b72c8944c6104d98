#include "client/json_output.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace quern::client {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// protobuf's own printer parses the message again from its binary form and takes seconds for a plan of 100,000 tensors. This one walks over
// the fields and prints the same values, in the order of the .proto files.
class JsonPrinter {
 public:
  explicit JsonPrinter(std::string* out) : out_(out) {}

  void Print(const Message& message, int depth) {
    // Timestamps, durations and the like have forms of their own, which are no objects.
    if (absl::StartsWith(message.GetDescriptor()->full_name(), "google.protobuf.")) {
      std::string text;
      // Fails only for times out of range.
      const bool printed = google::protobuf::util::MessageToJsonString(message, &text).ok();
      absl::StrAppend(out_, printed ? text : "null");
      return;
    }
    const Reflection& reflection = *message.GetReflection();
    const google::protobuf::Descriptor& descriptor = *message.GetDescriptor();
    out_->push_back('{');
    bool first = true;
    for (int i = 0; i < descriptor.field_count(); ++i) {
      const FieldDescriptor& field = *descriptor.field(i);
      // Scalars are always there, messages and members of a oneof where they are set.
      if (field.has_presence() && !reflection.HasField(message, &field)) continue;
      if (!first) out_->push_back(',');
      first = false;
      NewLine(depth + 1);
      absl::StrAppend(out_, "\"", field.name(), "\": ");
      if (field.is_repeated()) {
        PrintList(message, field, depth + 1);
      } else {
        PrintValue(message, field, -1, depth + 1);
      }
    }
    if (!first) NewLine(depth);
    out_->push_back('}');
  }

 private:
  void NewLine(int depth) {
    out_->push_back('\n');
    out_->append(depth, ' ');
  }

  void PrintList(const Message& message, const FieldDescriptor& field, int depth) {
    const int size = message.GetReflection()->FieldSize(message, &field);
    out_->push_back('[');
    for (int i = 0; i < size; ++i) {
      if (i > 0) out_->push_back(',');
      NewLine(depth + 1);
      PrintValue(message, field, i, depth + 1);
    }
    if (size > 0) NewLine(depth);
    out_->push_back(']');
  }

  // `index` -1: the field is no list.
  void PrintValue(const Message& message, const FieldDescriptor& field, int index, int depth) {
    const Reflection& reflection = *message.GetReflection();
    const bool one = index < 0;
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Print(one ? reflection.GetMessage(message, &field) : reflection.GetRepeatedMessage(message, &field, index), depth);
        break;
      case FieldDescriptor::CPPTYPE_STRING: {
        std::string scratch;
        const std::string& text = one ? reflection.GetStringReference(message, &field, &scratch)
                                      : reflection.GetRepeatedStringReference(message, &field, index, &scratch);
        if (field.type() == FieldDescriptor::TYPE_BYTES) {
          absl::StrAppend(out_, "\"", absl::Base64Escape(text), "\"");
        } else {
          PrintText(text);
        }
        break;
      }
      case FieldDescriptor::CPPTYPE_BOOL:
        absl::StrAppend(
            out_, (one ? reflection.GetBool(message, &field) : reflection.GetRepeatedBool(message, &field, index)) ? "true" : "false");
        break;
      case FieldDescriptor::CPPTYPE_INT32:
        absl::StrAppend(out_, one ? reflection.GetInt32(message, &field) : reflection.GetRepeatedInt32(message, &field, index));
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        absl::StrAppend(out_, one ? reflection.GetUInt32(message, &field) : reflection.GetRepeatedUInt32(message, &field, index));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        absl::StrAppend(out_, "\"", one ? reflection.GetInt64(message, &field) : reflection.GetRepeatedInt64(message, &field, index), "\"");
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        absl::StrAppend(out_, "\"", one ? reflection.GetUInt64(message, &field) : reflection.GetRepeatedUInt64(message, &field, index),
                        "\"");
        break;
      case FieldDescriptor::CPPTYPE_ENUM: {
        const int number = one ? reflection.GetEnumValue(message, &field) : reflection.GetRepeatedEnumValue(message, &field, index);
        const auto* value = field.enum_type()->FindValueByNumber(number);
        // A newer coordinator may have values that have no name here.
        absl::StrAppend(out_, value == nullptr ? absl::StrCat(number) : absl::StrCat("\"", value->name(), "\""));
        break;
      }
      case FieldDescriptor::CPPTYPE_DOUBLE:
        PrintNumber(one ? reflection.GetDouble(message, &field) : reflection.GetRepeatedDouble(message, &field, index));
        break;
      case FieldDescriptor::CPPTYPE_FLOAT:
        PrintNumber(one ? reflection.GetFloat(message, &field) : reflection.GetRepeatedFloat(message, &field, index));
        break;
    }
  }

  void PrintNumber(double value) {
    if (!std::isfinite(value)) {
      absl::StrAppend(out_, std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"");
      return;
    }
    std::string text = absl::StrFormat("%.15g", value);
    double again = 0;
    if (!absl::SimpleAtod(text, &again) || again != value) text = absl::StrFormat("%.17g", value);
    absl::StrAppend(out_, text);
  }

  // Strings of messages are UTF-8.
  void PrintText(absl::string_view text) {
    out_->push_back('"');
    size_t plain = 0;  // where the characters begin that are not appended yet
    for (size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) continue;
      out_->append(text.data() + plain, i - plain);
      plain = i + 1;
      switch (c) {
        case '"':
        case '\\':
          out_->push_back('\\');
          out_->push_back(static_cast<char>(c));
          break;
        case '\n':
          out_->append("\\n");
          break;
        case '\r':
          out_->append("\\r");
          break;
        case '\t':
          out_->append("\\t");
          break;
        case '\b':
          out_->append("\\b");
          break;
        case '\f':
          out_->append("\\f");
          break;
        default:
          absl::StrAppendFormat(out_, "\\u%04x", c);
      }
    }
    out_->append(text.data() + plain, text.size() - plain);
    out_->push_back('"');
  }

  std::string* const out_;
};

}  // namespace

std::string ToJson(const Message& message) {
  std::string text;
  JsonPrinter(&text).Print(message, 0);
  text.push_back('\n');
  return text;
}

std::string ErrorJson(const absl::Status& status) {
  const nlohmann::ordered_json json = {
      {"error", {{"code", absl::StatusCodeToString(status.code())}, {"message", std::string(status.message())}}}};
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace quern::client
