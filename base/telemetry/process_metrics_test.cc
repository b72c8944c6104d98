#include "base/telemetry/process_metrics.h"

#include <map>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

TEST(ProcessMetrics, TellOfThisProcess) {
  std::vector<MetricFamily> families;
  AddProcessMetrics("test", "1.2", 7, &families);
  std::map<std::string, MetricFamily::Sample> samples;
  for (const MetricFamily& family : families) {
    ASSERT_EQ(family.samples.size(), 1u) << family.name;
    samples[family.name] = family.samples[0];
  }
  EXPECT_GT(samples["process_resident_memory_bytes"].value, 1e6);
  EXPECT_LT(samples["process_resident_memory_bytes"].value, 1e10);
  EXPECT_GE(samples["process_open_fds"].value, 3);
  EXPECT_GE(samples["process_cpu_seconds_total"].value, 0);
  EXPECT_NEAR(samples["process_start_time_seconds"].value, static_cast<double>(absl::ToUnixSeconds(absl::Now())), 600);
  EXPECT_THAT(samples["quern_build_info"].labels, testing::Contains(testing::Pair("numerics", "7")));
}

}  // namespace
}  // namespace quern
