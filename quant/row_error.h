// Error figures of one row, part of the scalar definition: the order of sums is fixed, so figures are equal on every device.
//
// Element i of the row (counted from the row's start) adds to lane i % 16: error += d*d with d = f64(x) - f64(y), signal += f64(x)*f64(x),
// each product rounded, then added. Sum(lanes) folds 16 -> 8 -> 4 -> 2 -> 1 by adding lane i+n/2 to lane i. A matrix's figures are the sums
// over its rows in order. The header uses built-in types only, so that nvcc compiles the same text.
#ifndef QUERN_QUANT_ROW_ERROR_H_
#define QUERN_QUANT_ROW_ERROR_H_

#include <cstdint>

namespace quern::quant {

struct RowError {
  static constexpr int kLanes = 16;
  double error[kLanes] = {};
  double signal[kLanes] = {};
  double max_abs = 0;      // largest |x - y|
  uint64_t nonfinite = 0;  // elements that the policy replaced; the others are measured as usual, these as their replacement

  static double Fold(const double* lanes) {
    double sum[kLanes];
    for (int i = 0; i < kLanes; ++i) sum[i] = lanes[i];
    for (int n = kLanes / 2; n > 0; n /= 2) {
      for (int i = 0; i < n; ++i) sum[i] += sum[i + n];
    }
    return sum[0];
  }
  double SumSquaredError() const { return Fold(error); }
  double SumSquares() const { return Fold(signal); }
};

}  // namespace quern::quant

#endif  // QUERN_QUANT_ROW_ERROR_H_
