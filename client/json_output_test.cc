#include "client/json_output.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "quern/v1/jobs.pb.h"

namespace quern::client {
namespace {

TEST(JsonOutputTest, FieldsHaveTheirProtoNamesAndDefaultsArePresent) {
  quern::v1::Job job;
  job.set_name("jobs/1");
  job.set_state(quern::v1::Job::RUNNING);
  job.mutable_progress()->set_bytes_read(uint64_t{1} << 60);
  const nlohmann::json json = nlohmann::json::parse(ToJson(job));
  EXPECT_EQ(json["state"], "RUNNING");
  EXPECT_EQ(json["progress"]["bytes_read"], "1152921504606846976");
  EXPECT_EQ(json["progress"]["tasks_done"], 0);
  EXPECT_EQ(json["already_done"], false);
}

TEST(JsonOutputTest, SameMessageSameText) {
  quern::v1::Job job;
  job.set_name("jobs/1");
  EXPECT_EQ(ToJson(job), ToJson(quern::v1::Job(job)));
  EXPECT_EQ(ToJson(job).back(), '\n');
}

nlohmann::json Printed(const google::protobuf::Message& message) { return nlohmann::json::parse(ToJson(message)); }

nlohmann::json PrintedByProtobuf(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  EXPECT_TRUE(google::protobuf::util::MessageToJsonString(message, &text, options).ok());
  return nlohmann::json::parse(text);
}

TEST(JsonOutputTest, ValuesAreThoseOfProtobufsPrinter) {
  quern::v1::Job job;
  EXPECT_EQ(Printed(job), PrintedByProtobuf(job));
  job.set_name("jobs/1 \"quoted\" \\ \n\r\t\b\f\x01\x7f caf\u00e9");
  job.set_state(quern::v1::Job::FAILED);
  job.mutable_spec()->mutable_quantize()->add_targets("a");
  job.mutable_spec()->mutable_quantize()->add_targets("b");
  job.mutable_create_time()->set_seconds(1'700'000'000);
  job.mutable_create_time()->set_nanos(120'000'000);
  job.set_priority(-3);
  job.set_already_done(true);
  job.mutable_error();
  job.mutable_plan()->set_identity("\x00\xff\x10\x80");
  auto& file = *job.mutable_plan()->add_source_files();
  file.set_mtime_ns(std::numeric_limits<int64_t>::min());
  file.set_size(std::numeric_limits<uint64_t>::max());
  auto& shard = *job.mutable_plan()->add_shards();
  shard.add_layers(0);
  shard.add_layers(std::numeric_limits<uint32_t>::max());
  job.mutable_plan()->add_shards();
  for (const double value :
       {0.0, -0.0, 0.1, 1.0 / 3, 1e300, 5e-324, -2.5, 1e15, 123456789012345678.0, std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    job.mutable_progress()->set_sum_squares(value);
    EXPECT_EQ(Printed(job), PrintedByProtobuf(job));
  }
  quern::v1::WatchJobRequest watch;
  watch.mutable_interval()->set_nanos(250'000'000);
  EXPECT_EQ(Printed(watch), PrintedByProtobuf(watch));
}

TEST(JsonOutputTest, ValuesOfANewerCoordinatorAreNumbers) {
  quern::v1::Job job;
  job.set_state(static_cast<quern::v1::Job::State>(77));
  EXPECT_EQ(nlohmann::json::parse(ToJson(job))["state"], 77);
}

// Maps have a form of their own, which the printer does not know.
TEST(JsonOutputTest, NoMessageHasAMap) {
  const google::protobuf::FileDescriptor& jobs = *quern::v1::Job::descriptor()->file();
  for (const auto* file : {&jobs, quern::v1::PlanSummary::descriptor()->file()}) {
    for (int m = 0; m < file->message_type_count(); ++m) {
      for (int f = 0; f < file->message_type(m)->field_count(); ++f) EXPECT_FALSE(file->message_type(m)->field(f)->is_map());
    }
  }
}

TEST(JsonOutputTest, ErrorsCarryCodeAndMessageWhateverTheirBytes) {
  const nlohmann::json json = nlohmann::json::parse(ErrorJson(absl::NotFoundError("no \"x\"\n\xff")));
  EXPECT_EQ(json["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(json["error"]["message"], "no \"x\"\n\xEF\xBF\xBD");
}

}  // namespace
}  // namespace quern::client
