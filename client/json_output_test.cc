#include "client/json_output.h"

#include <gtest/gtest.h>

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

TEST(JsonOutputTest, ErrorsCarryCodeAndMessageWhateverTheirBytes) {
  const nlohmann::json json = nlohmann::json::parse(ErrorJson(absl::NotFoundError("no \"x\"\n\xff")));
  EXPECT_EQ(json["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(json["error"]["message"], "no \"x\"\n\xEF\xBF\xBD");
}

}  // namespace
}  // namespace quern::client
