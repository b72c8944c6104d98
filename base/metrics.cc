#include "base/metrics.h"

#include <cmath>

namespace quern {

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::Observe(double value) {
  if (!std::isfinite(value) || value < 0) return;
  size_t i = 0;
  while (i < bounds_.size() && value > bounds_[i]) ++i;
  counts_[i].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

Histogram::Snapshot Histogram::Read() const {
  Snapshot snapshot;
  snapshot.bounds = bounds_;
  for (const std::atomic<uint64_t>& count : counts_) snapshot.counts.push_back(count.load(std::memory_order_relaxed));
  snapshot.sum = sum_.load(std::memory_order_relaxed);
  return snapshot;
}

std::vector<double> Histogram::Exponential(double first, double factor, int count) {
  std::vector<double> bounds;
  for (double bound = first; static_cast<int>(bounds.size()) < count; bound *= factor) bounds.push_back(bound);
  return bounds;
}

MetricFamily& MetricFamily::Add(double value, Labels labels) {
  samples.push_back({std::move(labels), value, {}});
  return *this;
}

MetricFamily& MetricFamily::Add(Histogram::Snapshot histogram, Labels labels) {
  samples.push_back({std::move(labels), 0, std::move(histogram)});
  return *this;
}

}  // namespace quern
