// Numbers that both ends of the data plane (proto/quern/v1/data.proto) must agree on.
#ifndef QUERN_BASE_DATA_PLANE_H_
#define QUERN_BASE_DATA_PLANE_H_

#include <cstdint>

#include "base/byte_size.h"

namespace quern {

// The most bytes of a chunk, and of all chunks of a message.
inline constexpr uint64_t kLargestChunk = 1 * kMiB;

// What HTTP/2 may have on its way in one stream beyond what was read from it: enough for 10 Gbit/s over 6 ms.
inline constexpr int kStreamWindow = 8 << 20;
inline constexpr int kHttp2FrameSize = 1 << 20;

// A peer that does not answer a ping so long is taken for gone, and is pinged as often while a stream is open.
inline constexpr int kKeepaliveMs = 10'000;

}  // namespace quern

#endif  // QUERN_BASE_DATA_PLANE_H_
