#include "base/link/tls_context.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern {
namespace {

// The fastest first: what is sent is large, and processors are what limits it.
constexpr char kCiphers[] = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

absl::StatusOr<std::shared_ptr<SSL_CTX>> NewContext(const TlsFiles& files, TlsContexts::Side side) {
  const bool server = side == TlsContexts::Side::kServer;
  QUERN_RETURN_IF_ERROR(CheckTlsFiles(files).status());
  QUERN_ASSIGN_OR_RETURN(const std::string key_text, ReadSecretFile(files.key));
  const std::shared_ptr<SSL_CTX> context(SSL_CTX_new(server ? TLS_server_method() : TLS_client_method()), SSL_CTX_free);
  if (context == nullptr) return absl::ResourceExhaustedError("there is no memory for TLS");
  const std::unique_ptr<BIO, int (*)(BIO*)> bio(BIO_new_mem_buf(key_text.data(), static_cast<int>(key_text.size())), BIO_free);
  const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr), EVP_PKEY_free);
  const bool usable = SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) == 1 &&
                      SSL_CTX_set_ciphersuites(context.get(), kCiphers) == 1 &&
                      SSL_CTX_load_verify_locations(context.get(), files.authority.c_str(), nullptr) == 1 &&
                      SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str()) == 1 && key != nullptr &&
                      SSL_CTX_use_PrivateKey(context.get(), key.get()) == 1 && SSL_CTX_check_private_key(context.get()) == 1;
  ERR_clear_error();
  if (!usable) {
    return absl::InvalidArgumentError(
        absl::StrCat("TLS does not take ", files.authority, ", ", files.certificate, " and ", files.key, " together"));
  }
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | (server ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0), nullptr);
  // As gRPC: what the file holds is trusted, whoever signed it.
  X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(context.get()), X509_V_FLAG_PARTIAL_CHAIN);
  SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  // Every connection shows its certificate anew.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  if (SSL_CTX_set_num_tickets(context.get(), 0) != 1) return absl::InternalError("TLS does not go without session tickets");
  return context;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SSL_CTX>> TlsContexts::Get() {
  MutexLock lock(&mutex_);
  // Before they are read: a change meanwhile is seen later.
  const Versions versions = {VersionOf(files_.authority), VersionOf(files_.certificate), VersionOf(files_.key)};
  if (context_ != nullptr && versions == versions_) return context_;
  absl::StatusOr<std::shared_ptr<SSL_CTX>> context = NewContext(files_, side_);
  if (context.ok()) {
    context_ = *std::move(context);
    versions_ = versions;
  } else if (context_ == nullptr) {
    return context.status();
  }
  return context_;
}

}  // namespace quern
