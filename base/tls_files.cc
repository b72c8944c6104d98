#include "base/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/secret_file.h"
#include "base/status_macros.h"

namespace quern {
namespace {

constexpr uint64_t kLargestBundle = uint64_t{4} << 20;

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

Owned<BIO> Text(const std::string& text) { return Owned<BIO>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

absl::StatusOr<Owned<X509>> FirstCertificate(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, kLargestBundle));
  Owned<X509> certificate(PEM_read_bio_X509(Text(text).get(), nullptr, nullptr, nullptr));
  ERR_clear_error();
  if (certificate == nullptr) return absl::InvalidArgumentError(absl::StrCat(path, " holds no certificate in PEM form"));
  return certificate;
}

std::string TimeText(const ASN1_TIME* time) {
  const Owned<BIO> out(BIO_new(BIO_s_mem()));
  if (ASN1_TIME_print(out.get(), time) != 1) return "an unknown time";
  char* data = nullptr;
  const long size = BIO_get_mem_data(out.get(), &data);
  return std::string(data, size);
}

// A key with a pass phrase would need somebody to type it.
int NoPassPhrase(char*, int, int, void*) { return -1; }

}  // namespace

absl::StatusOr<TlsIdentity> CheckTlsFiles(const TlsFiles& files) {
  QUERN_RETURN_IF_ERROR(FirstCertificate(files.authority).status());
  QUERN_ASSIGN_OR_RETURN(const Owned<X509> certificate, FirstCertificate(files.certificate));
  QUERN_ASSIGN_OR_RETURN(const std::string key_text, ReadSecretFile(files.key));
  const Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(Text(key_text).get(), nullptr, NoPassPhrase, nullptr));
  ERR_clear_error();
  if (key == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(files.key, " holds no private key in PEM form, or one with a pass phrase"));
  }
  const bool pair = X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (!pair) return absl::InvalidArgumentError(absl::StrCat(files.key, " is not the key of the certificate ", files.certificate));
  TlsIdentity identity;
  identity.valid_until = TimeText(X509_get0_notAfter(certificate.get()));
  if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) <= 0) {
    return absl::FailedPreconditionError(absl::StrCat("the certificate ", files.certificate, " was valid until ", identity.valid_until));
  }
  if (X509_cmp_current_time(X509_get0_notBefore(certificate.get())) > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the certificate ", files.certificate, " is valid from ", TimeText(X509_get0_notBefore(certificate.get()))));
  }
  char name[256] = "";
  if (X509_NAME_get_text_by_NID(X509_get_subject_name(certificate.get()), NID_commonName, name, sizeof(name)) > 0) {
    identity.common_name = name;
  }
  return identity;
}

}  // namespace quern
