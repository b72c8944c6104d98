#include "base/telemetry/json_log.h"

#include <chrono>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "spdlog/details/log_msg.h"

namespace quern {
namespace {

std::string Format(const std::string& line) {
  const spdlog::details::log_msg message(spdlog::log_clock::time_point(std::chrono::milliseconds(1'767'323'045'678)), spdlog::source_loc{},
                                         "", spdlog::level::warn, line);
  spdlog::memory_buf_t buffer;
  NewJsonLogFormatter("quernd")->clone()->format(message, buffer);
  return std::string(buffer.data(), buffer.size());
}

TEST(JsonLog, PairsOfTheLineAreMembers) {
  EXPECT_EQ(Format("attempt event=ended job=jobs/1 task=24 message=\"no \\\"x\\\"\""),
            "{\"time\":\"2026-01-02T03:04:05.678Z\",\"level\":\"warning\",\"program\":\"quernd\","
            "\"text\":\"attempt event=ended job=jobs/1 task=24 message=\\\"no \\\\\\\"x\\\\\\\"\\\"\","
            "\"event\":\"ended\",\"job\":\"jobs/1\",\"task\":\"24\",\"message\":\"no \\\"x\\\"\"}\n");
}

TEST(JsonLog, ALineCannotReplaceWhatTheLogSays) {
  const nlohmann::json line = nlohmann::json::parse(Format("x level=info program=other job=jobs/1 job=jobs/2"));
  EXPECT_EQ(line["level"], "warning");
  EXPECT_EQ(line["program"], "quernd");
  EXPECT_EQ(line["job"], "jobs/1");
}

TEST(JsonLog, AnyBytesGiveOneLineOfJson) {
  const std::string text = Format("a\nb \xff \x01 \"");
  EXPECT_EQ(text.find('\n'), text.size() - 1);
  EXPECT_EQ(nlohmann::json::parse(text)["level"], "warning");
}

}  // namespace
}  // namespace quern
