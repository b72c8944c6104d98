#include "worker/pipeline/view_digest.h"

#include <cstdlib>

#include "base/xxh3.h"

namespace quern::worker {
namespace {

XXH3_state_t* NewState() {
  XXH3_state_t* state = XXH3_createState();
  if (state == nullptr) std::abort();  // out of memory for half a KiB
  return state;
}

}  // namespace

void Xxh3Stream::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Xxh3Stream::Xxh3Stream() : state_(NewState()) { Reset(); }

void Xxh3Stream::Reset() { XXH3_64bits_reset(state_.get()); }

void Xxh3Stream::Update(const void* data, size_t size) { XXH3_64bits_update(state_.get(), data, size); }

uint64_t Xxh3Stream::Digest64() const { return XXH3_64bits_digest(state_.get()); }

void ViewDigester::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

ViewDigester::ViewDigester() : state_(NewState()) { XXH3_128bits_reset(state_.get()); }

void ViewDigester::AddRow(uint64_t digest) {
  unsigned char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(digest >> (8 * i));
  XXH3_128bits_update(state_.get(), bytes, sizeof bytes);
}

std::string ViewDigester::Digest() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof canonical.digest);
}

}  // namespace quern::worker
