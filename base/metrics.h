// Figures that a program keeps of itself, and their form when somebody asks for them. Nothing here knows how they are served.
#ifndef QUERN_BASE_METRICS_H_
#define QUERN_BASE_METRICS_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace quern {

// Only grows. Thread-safe, never blocks.
class Counter {
 public:
  void Add(uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// How observations are spread. Thread-safe, never blocks; a reader may see an observation that is only half counted.
class Histogram {
 public:
  struct Snapshot {
    std::vector<double> bounds;    // upper ones, inclusive, ascending
    std::vector<uint64_t> counts;  // of each bound by itself, and one more for what is above all
    double sum = 0;
  };

  explicit Histogram(std::vector<double> bounds);
  // What is negative or no finite number is left out: it may come from elsewhere.
  void Observe(double value);
  Snapshot Read() const;

  // `count` bounds, each `factor` times the one before.
  static std::vector<double> Exponential(double first, double factor, int count);

 private:
  const std::vector<double> bounds_;
  std::vector<std::atomic<uint64_t>> counts_;
  std::atomic<double> sum_{0};
};

// All samples of one name, as they are at one moment. Names and units follow Prometheus: quern_..._seconds, _bytes, _total.
struct MetricFamily {
  enum class Kind { kCounter, kGauge, kHistogram };
  using Labels = std::vector<std::pair<std::string, std::string>>;
  struct Sample {
    Labels labels;
    double value = 0;               // of counters and gauges
    Histogram::Snapshot histogram;  // of histograms
  };

  MetricFamily(Kind kind, std::string name, std::string help) : kind(kind), name(std::move(name)), help(std::move(help)) {}
  MetricFamily& Add(double value, Labels labels = {});
  MetricFamily& Add(Histogram::Snapshot histogram, Labels labels = {});

  Kind kind;
  std::string name;
  std::string help;
  std::vector<Sample> samples;
};

}  // namespace quern

#endif  // QUERN_BASE_METRICS_H_
