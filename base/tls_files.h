// The files by which two programs know each other (mutual TLS).
#ifndef QUERN_BASE_TLS_FILES_H_
#define QUERN_BASE_TLS_FILES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace quern {

struct TlsFiles {
  std::string authority;    // PEM: certificates of the authorities that sign the other side's
  std::string certificate;  // PEM: this program's, with those between it and its authority
  std::string key;          // PEM: its private key
  bool any() const { return !authority.empty() || !certificate.empty() || !key.empty(); }
  bool all() const { return !authority.empty() && !certificate.empty() && !key.empty(); }
};

struct TlsIdentity {
  std::string common_name;
  std::string valid_until;  // "Nov 30 20:00:00 2027 GMT"
};

// Reads all three and says what is wrong with which: no PEM, the key of another certificate or readable by others, a certificate that is
// over or not yet valid. Blocks.
absl::StatusOr<TlsIdentity> CheckTlsFiles(const TlsFiles& files);

}  // namespace quern

#endif  // QUERN_BASE_TLS_FILES_H_
