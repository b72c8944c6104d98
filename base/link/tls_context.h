// The certificates that data connections use.
#ifndef QUERN_BASE_LINK_TLS_CONTEXT_H_
#define QUERN_BASE_LINK_TLS_CONTEXT_H_

#include <openssl/ssl.h>

#include <array>
#include <memory>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/secret_file.h"
#include "base/tls_files.h"

namespace quern {

// Mutual TLS 1.3, of either side. Thread-safe.
class TlsContexts {
 public:
  enum class Side { kClient, kServer };
  TlsContexts(TlsFiles files, Side side) : files_(std::move(files)), side_(side) {}

  // For the next connection. The files are read again when they have changed; while they are of no use, what was read before stays in
  // force. The first reading's errors are those of CheckTlsFiles. Blocks.
  absl::StatusOr<std::shared_ptr<SSL_CTX>> Get();

 private:
  using Versions = std::array<FileVersion, 3>;

  const TlsFiles files_;
  const Side side_;
  Mutex mutex_;
  Versions versions_ QUERN_GUARDED_BY(mutex_);
  std::shared_ptr<SSL_CTX> context_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern

#endif  // QUERN_BASE_LINK_TLS_CONTEXT_H_
