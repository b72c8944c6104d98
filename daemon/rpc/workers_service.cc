#include <atomic>
#include <utility>

#include "absl/time/time.h"
#include "base/clock.h"
#include "daemon/rpc/services.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

class SynchronizeCall : public grpc::ServerUnaryReactor {
 public:
  SynchronizeCall(JobQueue* queue, Histogram* seconds, const quern::v1::SynchronizeRequest& request, const std::string& principal,
                  quern::v1::SynchronizeResponse* response)
      : queue_(queue), ticket_(next_ticket.fetch_add(1)) {
    const absl::Duration began = Clock::Real()->Monotonic();
    queue_->Synchronize(request, principal, ticket_,
                        [this, response, seconds, began](absl::StatusOr<quern::v1::SynchronizeResponse> answer) {
                          seconds->Observe(absl::ToDoubleSeconds(Clock::Real()->Monotonic() - began));
                          if (answer.ok()) *response = *std::move(answer);
                          Finish(ToGrpcStatus(answer.status()));
                        });
  }

  // A worker that is gone must not be given work by its last call.
  void OnCancel() override { queue_->CancelSynchronize(ticket_); }
  void OnDone() override { delete this; }

 private:
  static std::atomic<uint64_t> next_ticket;
  JobQueue* const queue_;
  const uint64_t ticket_;
};

std::atomic<uint64_t> SynchronizeCall::next_ticket{1};

}  // namespace

grpc::ServerUnaryReactor* WorkersService::Synchronize(grpc::CallbackServerContext* context, const quern::v1::SynchronizeRequest* request,
                                                      quern::v1::SynchronizeResponse* response) {
  return new SynchronizeCall(queue_, request->may_wait() ? &waiting_seconds_ : &prompt_seconds_, *request, principal_of_(context),
                             response);
}

}  // namespace quern::daemon
