#include "base/metrics.h"

#include <cmath>
#include <limits>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

using ::testing::ElementsAre;

TEST(Histogram, BoundsAreInclusiveAndTheLastCountIsOfWhatIsAboveAll) {
  Histogram histogram({1, 2, 4});
  for (const double value : {0.0, 1.0, 1.5, 2.0, 4.0, 4.1, 100.0}) histogram.Observe(value);
  const Histogram::Snapshot snapshot = histogram.Read();
  EXPECT_THAT(snapshot.bounds, ElementsAre(1, 2, 4));
  EXPECT_THAT(snapshot.counts, ElementsAre(2, 2, 1, 2));
  EXPECT_DOUBLE_EQ(snapshot.sum, 112.6);
}

TEST(Histogram, WhatIsNoAmountIsLeftOut) {
  Histogram histogram({1});
  for (const double value : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) histogram.Observe(value);
  EXPECT_THAT(histogram.Read().counts, ElementsAre(0, 0));
  EXPECT_EQ(histogram.Read().sum, 0);
}

TEST(Histogram, ExponentialBoundsGrowByTheFactor) { EXPECT_THAT(Histogram::Exponential(0.5, 4, 3), ElementsAre(0.5, 2, 8)); }

TEST(Histogram, ThreadsLoseNoObservation) {
  Histogram histogram({1});
  Counter counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 10'000; ++j) {
        histogram.Observe(0.5);
        counter.Add(2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(histogram.Read().counts, ElementsAre(40'000, 0));
  EXPECT_EQ(histogram.Read().sum, 20'000);
  EXPECT_EQ(counter.value(), 80'000u);
}

}  // namespace
}  // namespace quern
