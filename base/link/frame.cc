#include "base/link/frame.h"

#include <string.h>

#include <array>
#include <bit>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

template <typename T>
void AppendNumber(T value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T TakeNumber(const char** at) {
  T value;
  memcpy(&value, *at, sizeof(value));
  *at += sizeof(value);
  return value;
}

}  // namespace

void AppendFrameHead(const LinkFrame& frame, std::string* out) {
  AppendNumber(static_cast<uint32_t>(frame.kind), out);
  AppendNumber(frame.size, out);
  AppendNumber(frame.range, out);
  AppendNumber(frame.offset, out);
  AppendNumber(frame.length, out);
  AppendNumber(frame.xxh3, out);
}

void AppendFrame(LinkFrame frame, absl::string_view payload, std::string* out) {
  frame.size = static_cast<uint32_t>(payload.size());
  AppendFrameHead(frame, out);
  out->append(payload.data(), payload.size());
}

absl::StatusOr<std::optional<LinkFrame>> ReadFrameHead(LinkConnection& connection) {
  std::array<char, kFrameHeadSize> bytes;
  QUERN_ASSIGN_OR_RETURN(const bool there, connection.Read(bytes.data(), bytes.size()));
  if (!there) return std::optional<LinkFrame>();
  const char* at = bytes.data();
  const uint32_t kind = TakeNumber<uint32_t>(&at);
  LinkFrame frame;
  frame.kind = static_cast<LinkFrame::Kind>(kind);
  frame.size = TakeNumber<uint32_t>(&at);
  frame.range = TakeNumber<uint64_t>(&at);
  frame.offset = TakeNumber<uint64_t>(&at);
  frame.length = TakeNumber<uint64_t>(&at);
  frame.xxh3 = TakeNumber<uint64_t>(&at);
  if (kind < static_cast<uint32_t>(LinkFrame::Kind::kRange) || kind > static_cast<uint32_t>(LinkFrame::Kind::kEnd)) {
    return absl::InvalidArgumentError(absl::StrCat("a frame of the kind ", kind, ", which is none"));
  }
  if (frame.size > kLargestChunk) {
    return absl::InvalidArgumentError(absl::StrCat("a frame of ", frame.size, " bytes: at most ", kLargestChunk, " are taken"));
  }
  return std::optional<LinkFrame>(frame);
}

absl::Status ReadPayload(LinkConnection& connection, void* data, size_t size) {
  if (size == 0) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(const bool there, connection.Read(data, size));
  return there ? absl::OkStatus() : absl::UnavailableError("the data connection was ended within a frame");
}

}  // namespace quern
