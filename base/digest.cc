#include "base/digest.h"

#include <openssl/evp.h>

#include <cstdlib>

#include "absl/strings/escaping.h"
#include "base/xxh3.h"

namespace quern {

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  if (context_ == nullptr || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1) std::abort();
}

Sha256::~Sha256() = default;

void Sha256::Update(const void* data, size_t size) {
  if (EVP_DigestUpdate(context_.get(), data, size) != 1) std::abort();
}

std::string Sha256::Finish() {
  std::string raw(kSize, '\0');
  unsigned size = 0;
  if (EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(raw.data()), &size) != 1) std::abort();
  return raw;
}

std::string Sha256Of(absl::string_view data) {
  Sha256 sha;
  sha.Update(data);
  return sha.Finish();
}

uint64_t Xxh3Of(const void* data, size_t size) { return XXH3_64bits(data, size); }

std::string Xxh3_128Of(absl::string_view data) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data.data(), data.size()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

std::string HexDigest(absl::string_view raw) { return absl::BytesToHexString(raw); }

}  // namespace quern
