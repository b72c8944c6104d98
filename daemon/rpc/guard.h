// Decides who may call what. It stands before every call of every service: gRPC asks it before a message is read and before any handler
// runs, so that no method can be served that it does not know.
#ifndef QUERN_DAEMON_RPC_GUARD_H_
#define QUERN_DAEMON_RPC_GUARD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/secret_file.h"
#include "daemon/rpc/log_limiter.h"
#include "daemon/rpc/token_file.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "grpcpp/server_context.h"

namespace quern::daemon {

// Bytes that a client may say about a call: a token and a few more words.
inline constexpr size_t kLargestMetadata = 16 << 10;

struct GuardOptions {
  // Empty: whoever reaches a listener may do everything.
  std::string token_file;
  // Calls that may be open at a time, of all callers.
  int64_t most_calls = 16384;
  // Likewise, of one token (where there are none: of one origin) and one certificate.
  int64_t most_calls_per_caller = 12288;
  Clock* clock = nullptr;
  LogLine log;
};

// Thread-safe. Outlives the server whose calls it judges.
class Guard {
 public:
  // An unusable token file is an error, which never quotes it. Blocks.
  static absl::StatusOr<std::unique_ptr<Guard>> Open(GuardOptions options);

  // For the credentials of one listener. `origin` says whose connections come there, for the log: "uid:1000".
  std::shared_ptr<grpc::AuthMetadataProcessor> ProcessorFor(std::function<std::string()> origin);

  // Whom the caller has shown to be, by its token's name and its certificate's common name, which outlive their renewal; empty where
  // neither is asked for.
  std::string PrincipalOf(grpc::ServerContextBase* context) { return CallerOf(context, /*with_origin=*/false); }
  // Who made a call, as "who=... certificate=... from=...".
  std::string Describe(grpc::ServerContextBase* context);

  // Reads the token file when it is another one than before. After an error the tokens of before stay in force, and the log says so.
  // Blocks.
  void Poll();

  // Counts a call until it is destroyed. `context` has the call's metadata.
  class OpenCall {
   public:
    OpenCall(Guard* guard, grpc::ServerContextBase* context);
    ~OpenCall();
    OpenCall(const OpenCall&) = delete;
    OpenCall& operator=(const OpenCall&) = delete;

   private:
    Guard* const guard_;
    const std::string caller_;
  };
  int64_t open_calls();
  // How many calls the guard has refused with this code.
  uint64_t refused(grpc::StatusCode code) const { return refused_calls_[code].value(); }

 private:
  class Processor;

  explicit Guard(GuardOptions options);
  std::shared_ptr<const TokenTable> tokens();
  // Whether a call is allowed. `who` becomes what is known of the caller.
  grpc::Status Judge(absl::string_view method, const grpc::AuthMetadataProcessor::InputMetadata& metadata, absl::string_view origin,
                     absl::string_view certificate, std::string* who);
  // What calls are counted by.
  static std::string CallerOf(const Token* token, absl::string_view origin, absl::string_view certificate);
  std::string CallerOf(grpc::ServerContextBase* context, bool with_origin);
  grpc::Status CheckOpenCalls(const std::string& caller);

  const GuardOptions options_;
  LogLimiter refused_;
  std::array<Counter, grpc::StatusCode::UNAUTHENTICATED + 1> refused_calls_;
  Mutex calls_mutex_;
  int64_t open_calls_ QUERN_GUARDED_BY(calls_mutex_) = 0;
  std::unordered_map<std::string, int64_t> open_calls_of_ QUERN_GUARDED_BY(calls_mutex_);
  Mutex mutex_;
  std::shared_ptr<const TokenTable> tokens_ QUERN_GUARDED_BY(mutex_);  // nullptr: none are needed
  FileVersion version_ QUERN_GUARDED_BY(mutex_);
  // Properties of a connection are shared by its calls, and gRPC does not guard them.
  Mutex properties_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_GUARD_H_
