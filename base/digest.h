// Content digests: SHA-256 for files, XXH3-128 for views of source tensors and samples.
#ifndef QUERN_BASE_DIGEST_H_
#define QUERN_BASE_DIGEST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

struct evp_md_ctx_st;

namespace quern {

// Streaming SHA-256 (OpenSSL). Not thread-safe.
class Sha256 {
 public:
  static constexpr size_t kSize = 32;

  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(const void* data, size_t size);
  void Update(absl::string_view data) { Update(data.data(), data.size()); }
  // The 32 raw bytes. The object must not be used afterwards.
  std::string Finish();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

// The 32 raw bytes of SHA-256 of `data`.
std::string Sha256Of(absl::string_view data);

// XXH3-64 of `size` bytes, seed 0.
uint64_t Xxh3Of(const void* data, size_t size);

// The 16 raw bytes of XXH3-128, seed 0, in canonical (big-endian) order.
std::string Xxh3_128Of(absl::string_view data);

// Lower-case hexadecimal of raw bytes.
std::string HexDigest(absl::string_view raw);

}  // namespace quern

#endif  // QUERN_BASE_DIGEST_H_
