// The digest of a view: XXH3-128 over the XXH3-64 digests (eight bytes each, little-endian) of its storage rows, in order.
#ifndef QUERN_WORKER_PIPELINE_VIEW_DIGEST_H_
#define QUERN_WORKER_PIPELINE_VIEW_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct XXH3_state_s;

namespace quern::worker {

// Streaming XXH3. Not thread-safe.
class Xxh3Stream {
 public:
  Xxh3Stream();
  void Reset();
  void Update(const void* data, size_t size);
  uint64_t Digest64() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

class ViewDigester {
 public:
  ViewDigester();
  // The XXH3-64 digest of the next row.
  void AddRow(uint64_t digest);
  // The 16 raw bytes, in canonical (big-endian) order.
  std::string Digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_VIEW_DIGEST_H_
