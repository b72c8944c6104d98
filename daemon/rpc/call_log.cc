#include "daemon/rpc/call_log.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "daemon/rpc/method_roles.h"
#include "quern/v1/jobs.pb.h"

namespace quern::daemon {
namespace {

using grpc::experimental::InterceptionHookPoints;

std::string NameIn(const google::protobuf::Message& message) {
  const google::protobuf::FieldDescriptor* const field = message.GetDescriptor()->FindFieldByName("name");
  if (field == nullptr || field->is_repeated() || field->type() != google::protobuf::FieldDescriptor::TYPE_STRING) return "";
  return message.GetReflection()->GetString(message, field);
}

// Lives as long as its call.
class Call : public grpc::experimental::Interceptor {
 public:
  Call(grpc::experimental::ServerRpcInfo* info, Guard* guard, CallCounter* counter, const LogLine* log)
      : info_(info), rule_(FindMethodRule(info->method())), guard_(guard), counter_(counter), log_(log) {
    if (counter_ != nullptr) counter_->Begin();
  }
  ~Call() override {
    if (counter_ != nullptr) counter_->End();
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA))
      open_.emplace(guard_, info_->server_context());
    // Only Quern's own methods, whose messages are protobuf's.
    if (counter_ != nullptr && rule_ != nullptr) {
      if (rule_->changes_state) {
        if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) NoteRequest(methods->GetRecvMessage());
        if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) NoteAnswer(methods->GetSendMessage());
      }
      if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) Write(methods->GetSendStatus());
    }
    methods->Proceed();
  }

 private:
  void NoteRequest(const void* request) {
    if (request == nullptr) return;
    const auto* const message = static_cast<const google::protobuf::Message*>(request);
    target_ = NameIn(*message);
    if (const auto* create = dynamic_cast<const quern::v1::CreateJobRequest*>(message)) output_ = create->spec().output();
  }
  void NoteAnswer(const void* answer) {
    if (answer != nullptr && target_.empty()) target_ = NameIn(*static_cast<const google::protobuf::Message*>(answer));
  }
  void Write(const grpc::Status& status) {
    if (!*log_ || (!rule_->changes_state && status.error_code() != grpc::StatusCode::PERMISSION_DENIED)) return;
    const absl::string_view method = rule_->method;
    (*log_)(absl::StrCat("audit event=call ", guard_->Describe(info_->server_context()), " method=", method.substr(method.rfind('/') + 1),
                         target_.empty() ? "" : absl::StrCat(" target=", LogValue(target_)),
                         output_.empty() ? "" : absl::StrCat(" output=", LogValue(output_)),
                         " result=", absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()))));
  }

  grpc::experimental::ServerRpcInfo* const info_;
  const MethodRule* const rule_;
  Guard* const guard_;
  CallCounter* const counter_;
  const LogLine* const log_;
  std::optional<Guard::OpenCall> open_;
  std::string target_, output_;
};

class CallLog : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  CallLog(Guard* guard, CallCounter* counter, LogLine log) : guard_(guard), counter_(counter), log_(std::move(log)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    // Health checks may watch for as long as the server lives: its end does not wait for them.
    return new Call(info, guard_, absl::StartsWith(info->method(), "/quern.") ? counter_ : nullptr, &log_);
  }

 private:
  Guard* const guard_;
  CallCounter* const counter_;
  const LogLine log_;
};

}  // namespace

void CallCounter::Begin() {
  MutexLock lock(&mutex_);
  ++count_;
}

void CallCounter::End() {
  MutexLock lock(&mutex_);
  if (--count_ == 0) none_.SignalAll();
}

void CallCounter::AwaitNone(absl::Duration patience) {
  const absl::Duration deadline = Clock::Real()->Monotonic() + patience;
  MutexLock lock(&mutex_);
  while (count_ > 0) {
    const absl::Duration left = deadline - Clock::Real()->Monotonic();
    if (left <= absl::ZeroDuration()) return;
    none_.WaitFor(&mutex_, left);
  }
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> NewCallLog(Guard* guard, CallCounter* counter, LogLine log) {
  return std::make_unique<CallLog>(guard, counter, std::move(log));
}

}  // namespace quern::daemon
