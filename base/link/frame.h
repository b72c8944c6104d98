// What goes over a data connection after its ticket: frames, each a head of 40 bytes and a payload of at most 1 MiB.
//
// The head has, little-endian: kind (4 bytes), size of the payload (4), range (8), offset (8), length (8), XXH3-64 of the payload (8, of
// chunks only). Which fields a kind uses is said below; the others are 0.
#ifndef QUERN_BASE_LINK_FRAME_H_
#define QUERN_BASE_LINK_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/byte_size.h"
#include "base/link/connection.h"

namespace quern {

// The most bytes of a payload.
inline constexpr uint64_t kLargestChunk = 1 * kMiB;
inline constexpr size_t kFrameHeadSize = 40;

struct LinkFrame {
  enum class Kind : uint32_t {
    kRange = 1,     // worker: send `length` bytes at `offset` of the file named by the payload (empty: as before), as range number `range`
    kChunk = 2,     // bytes at `offset` of the file; of a source also `range`
    kDurable = 3,   // coordinator: the bytes of the shard below `offset` are on its disk
    kFinish = 4,    // worker: all bytes of the shard have been sent
    kFinished = 5,  // coordinator: and so are the shard's name and its end
    kEnd = 6,       // coordinator: the last frame; the payload is a quern.v1.ErrorStatus, empty for success
  };
  Kind kind = Kind::kEnd;
  uint32_t size = 0;
  uint64_t range = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t xxh3 = 0;
};

void AppendFrameHead(const LinkFrame& frame, std::string* out);
// With `payload`, whose size it sets.
void AppendFrame(LinkFrame frame, absl::string_view payload, std::string* out);

// The next head; nothing when the peer has ended its side. INVALID_ARGUMENT for a kind that is not known and a payload that is too large:
// nothing is allocated on the word of a peer.
absl::StatusOr<std::optional<LinkFrame>> ReadFrameHead(LinkConnection& connection);
// Exactly `size` bytes of the payload, into `data`.
absl::Status ReadPayload(LinkConnection& connection, void* data, size_t size);

}  // namespace quern

#endif  // QUERN_BASE_LINK_FRAME_H_
