// Numbers as people read them on a terminal.
#ifndef QUERN_CLIENT_HUMAN_H_
#define QUERN_CLIENT_HUMAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace quern::client {

// "0:08", "12:34", "1:02:03", "2d 03:04". Negative and infinite durations are "-".
std::string FormatElapsed(absl::Duration duration);

// Decimal units, as disks are sold: "1.42 GB/s", "87.3 MB/s". No time passed: "-".
std::string FormatRate(uint64_t bytes, absl::Duration duration);

// Signal to quantization noise in decibels, "21.4 dB". No signal: "-"; no error: "exact".
std::string FormatSqnr(double sum_squares, double sum_squared_error);

// "36,769".
std::string FormatCount(uint64_t count);

// Sorted or not, duplicates or not: "0-3, 5, 7-9".
std::string FormatRanges(std::vector<uint64_t> numbers);

}  // namespace quern::client

#endif  // QUERN_CLIENT_HUMAN_H_
