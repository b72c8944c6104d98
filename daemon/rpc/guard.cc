#include "daemon/rpc/guard.h"

#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "daemon/rpc/method_roles.h"
#include "grpc/grpc_security_constants.h"

namespace quern::daemon {
namespace {

constexpr char kOrigin[] = "quern_origin";
constexpr char kMethod[] = ":path";
constexpr char kAuthorization[] = "authorization";
constexpr int kRefusedLinesPerSecond = 20;
constexpr size_t kMetadataOverhead = 32;  // that HTTP/2 counts for each pair

absl::string_view View(grpc::string_ref text) { return absl::string_view(text.data(), text.size()); }

// An error unless there is exactly one.
absl::StatusOr<absl::string_view> OnlyValue(const grpc::AuthMetadataProcessor::InputMetadata& metadata, const char* key) {
  const auto [begin, end] = metadata.equal_range(key);
  if (begin == end) return absl::NotFoundError("none");
  if (std::next(begin) != end) return absl::InvalidArgumentError("several");
  return View(begin->second);
}

absl::StatusOr<absl::string_view> TokenIn(const grpc::AuthMetadataProcessor::InputMetadata& metadata) {
  QUERN_ASSIGN_OR_RETURN(absl::string_view value, OnlyValue(metadata, kAuthorization));
  if (absl::StartsWithIgnoreCase(value, "bearer ")) return value.substr(7);
  return absl::InvalidArgumentError("no bearer token");
}

std::string Property(const grpc::AuthContext& context, const char* name) {
  const std::vector<grpc::string_ref> values = context.FindPropertyValues(name);
  return values.empty() ? "" : std::string(View(values[0]));
}

}  // namespace

class Guard::Processor : public grpc::AuthMetadataProcessor {
 public:
  Processor(Guard* guard, std::function<std::string()> origin) : guard_(guard), origin_(std::move(origin)) {}
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*, OutputMetadata*) override {
    const std::string origin = origin_();
    std::string certificate;
    {
      MutexLock lock(&guard_->properties_);
      // Once a connection; Describe reads it.
      if (context->FindPropertyValues(kOrigin).empty()) context->AddProperty(kOrigin, origin);
      certificate = Property(*context, GRPC_X509_CN_PROPERTY_NAME);
    }
    const absl::StatusOr<absl::string_view> path = OnlyValue(metadata, kMethod);
    const absl::string_view method = path.ok() ? *path : "";
    std::string who;
    grpc::Status status = guard_->Judge(method, metadata, origin, certificate, &who);
    if (status.ok()) return status;
    guard_->refused_calls_[status.error_code()].Add();
    guard_->refused_.Write(absl::StrCat("audit event=refused who=", LogValue(who), " certificate=", LogValue(certificate), " from=",
                                        LogValue(origin), " method=", LogValue(method), " reason=", LogValue(status.error_message())));
    return status;
  }

 private:
  Guard* const guard_;
  const std::function<std::string()> origin_;
};

Guard::Guard(GuardOptions options) : options_(std::move(options)), refused_(options_.log, options_.clock, kRefusedLinesPerSecond) {}

absl::StatusOr<std::unique_ptr<Guard>> Guard::Open(GuardOptions options) {
  std::unique_ptr<Guard> guard(new Guard(std::move(options)));
  const std::string& path = guard->options_.token_file;
  if (path.empty()) return guard;
  const FileVersion version = VersionOf(path);  // before it is read: a change meanwhile is seen later
  QUERN_ASSIGN_OR_RETURN(TokenTable table, TokenTable::Read(path));
  MutexLock lock(&guard->mutex_);
  guard->version_ = version;
  guard->tokens_ = std::make_shared<const TokenTable>(std::move(table));
  return guard;
}

std::shared_ptr<grpc::AuthMetadataProcessor> Guard::ProcessorFor(std::function<std::string()> origin) {
  return std::make_shared<Processor>(this, std::move(origin));
}

std::shared_ptr<const TokenTable> Guard::tokens() {
  MutexLock lock(&mutex_);
  return tokens_;
}

void Guard::Poll() {
  if (options_.token_file.empty()) return;
  const FileVersion version = VersionOf(options_.token_file);
  {
    MutexLock lock(&mutex_);
    if (version == version_) return;
    version_ = version;
  }
  absl::StatusOr<TokenTable> table = TokenTable::Read(options_.token_file);
  if (table.ok()) {
    const size_t count = table->tokens().size();
    {
      MutexLock lock(&mutex_);
      tokens_ = std::make_shared<const TokenTable>(*std::move(table));
    }
    if (options_.log) options_.log(absl::StrCat("audit event=tokens_reloaded tokens=", count));
  } else if (options_.log) {
    options_.log(absl::StrCat("audit event=tokens_not_reloaded reason=", LogValue(table.status().message()),
                              " note=\"the tokens of before stay in force\""));
  }
}

grpc::Status Guard::Judge(absl::string_view method, const grpc::AuthMetadataProcessor::InputMetadata& metadata, absl::string_view origin,
                          absl::string_view certificate, std::string* who) {
  *who = std::string(origin);
  // gRPC's own limit holds only for clients that have acknowledged it.
  size_t size = 0;
  for (const auto& [key, value] : metadata) size += key.size() + value.size() + kMetadataOverhead;
  if (size > kLargestMetadata) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                        absl::StrCat("the call has more than ", kLargestMetadata, " bytes of metadata"));
  }
  const MethodRule* const rule = FindMethodRule(method);
  if (rule == nullptr) return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "there is no such method here");
  const Token* token = nullptr;
  const std::shared_ptr<const TokenTable> table = tokens();
  if (table != nullptr) {
    const absl::StatusOr<absl::string_view> presented = TokenIn(metadata);
    if (presented.ok()) token = table->Find(*presented);
    if (token != nullptr) *who = absl::StrCat("token:", token->name);
    if (rule->roles != 0) {
      if (!presented.ok()) {
        return grpc::Status(grpc::StatusCode::UNAUTHENTICATED,
                            "this coordinator asks for a token: give --token-file FILE, or set QUERN_TOKEN_FILE");
      }
      if (token == nullptr) {
        return grpc::Status(grpc::StatusCode::UNAUTHENTICATED,
                            "the token is none of this coordinator's: ask its administrator for one (--token-file, QUERN_TOKEN_FILE)");
      }
      if (!Admits(*rule, token->roles)) {
        return grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                            absl::StrCat("the token \"", token->name, "\" has the role ", RoleNames(token->roles), "; this call needs ",
                                         RoleNames(rule->roles | Role::kAdmin)));
      }
    }
  }
  return CheckOpenCalls(CallerOf(token, origin, certificate));
}

std::string Guard::CallerOf(const Token* token, absl::string_view origin, absl::string_view certificate) {
  const std::string who = token != nullptr ? absl::StrCat("token:", token->name) : std::string(origin);
  // Nothing in front of it has a blank.
  return certificate.empty() ? who : absl::StrCat(who, who.empty() ? "" : " ", "certificate:", certificate);
}

std::string Guard::CallerOf(grpc::ServerContextBase* context, bool with_origin) {
  std::string origin, certificate;
  if (const std::shared_ptr<const grpc::AuthContext> properties = context->auth_context(); properties != nullptr) {
    MutexLock lock(&properties_);
    if (with_origin) origin = Property(*properties, kOrigin);
    certificate = Property(*properties, GRPC_X509_CN_PROPERTY_NAME);
  }
  const std::shared_ptr<const TokenTable> table = tokens();
  const absl::StatusOr<absl::string_view> presented = TokenIn(context->client_metadata());
  return CallerOf(table != nullptr && presented.ok() ? table->Find(*presented) : nullptr, origin, certificate);
}

grpc::Status Guard::CheckOpenCalls(const std::string& caller) {
  MutexLock lock(&calls_mutex_);
  if (open_calls_ >= options_.most_calls) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                        absl::StrCat("this coordinator has ", options_.most_calls, " calls open, and takes no more at a time"));
  }
  const auto open = open_calls_of_.find(caller);
  if (open == open_calls_of_.end() || open->second < options_.most_calls_per_caller) return grpc::Status::OK;
  return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                      absl::StrCat(caller, " has ", options_.most_calls_per_caller,
                                   " calls open, and this coordinator takes no more of one client at a time"));
}

int64_t Guard::open_calls() {
  MutexLock lock(&calls_mutex_);
  return open_calls_;
}

Guard::OpenCall::OpenCall(Guard* guard, grpc::ServerContextBase* context)
    : guard_(guard), caller_(guard->CallerOf(context, /*with_origin=*/true)) {
  MutexLock lock(&guard_->calls_mutex_);
  ++guard_->open_calls_;
  ++guard_->open_calls_of_[caller_];
}

Guard::OpenCall::~OpenCall() {
  MutexLock lock(&guard_->calls_mutex_);
  --guard_->open_calls_;
  const auto open = guard_->open_calls_of_.find(caller_);
  if (--open->second == 0) guard_->open_calls_of_.erase(open);
}

std::string Guard::Describe(grpc::ServerContextBase* context) {
  std::string who, certificate;
  if (const std::shared_ptr<const grpc::AuthContext> properties = context->auth_context(); properties != nullptr) {
    MutexLock lock(&properties_);
    who = Property(*properties, kOrigin);
    certificate = Property(*properties, GRPC_X509_CN_PROPERTY_NAME);
  }
  if (const std::shared_ptr<const TokenTable> table = tokens(); table != nullptr) {
    const absl::StatusOr<absl::string_view> presented = TokenIn(context->client_metadata());
    const Token* const token = presented.ok() ? table->Find(*presented) : nullptr;
    who = token != nullptr ? absl::StrCat("token:", token->name) : "token:withdrawn";
  }
  return absl::StrCat("who=", LogValue(who), certificate.empty() ? "" : absl::StrCat(" certificate=", LogValue(certificate)),
                      " from=", LogValue(context->peer()));
}

}  // namespace quern::daemon
