#include "client/connection.h"

#include <sys/random.h>

#include <chrono>
#include <future>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/channel/await_connected.h"
#include "base/channel/deadline.h"
#include "base/endpoint.h"
#include "base/status_macros.h"
#include "base/worker_name.h"
#include "client/exit_code.h"

namespace quern::client {

namespace {

// The coordinator's reason for what was mistyped on the command line.
constexpr char kBadOption[] = "BAD_OPTION";

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  quern::v1::ErrorStatus details;
  quern::v1::ErrorInfo info;
  if (!status.ok() && details.ParseFromString(status.error_details()) && details.details_size() > 0 &&
      info.ParseFromString(details.details(0).value()) && info.reason() == kBadOption) {
    return UsageError(status.error_message());
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status FromErrorStatus(const std::string& serialized) {
  if (serialized.empty()) return absl::OkStatus();
  quern::v1::ErrorStatus error;
  if (!error.ParseFromString(serialized)) return absl::UnavailableError("the coordinator's last word is garbled");
  return FromGrpc(grpc::Status(static_cast<grpc::StatusCode>(error.code()), error.message(), serialized));
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 * kMiB);
  arguments.SetMaxSendMessageSize(64 * kMiB);
  // Error messages that list every problem of a checkpoint come in the trailers; gRPC's own limit is 8 KiB.
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(kMiB));
  // A coordinator stands on this machine or in this network.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A restarted daemon is found again soon.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  return grpc::CreateCustomChannel(address, NewChannelCredentials(address, security), arguments);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& address, const ChannelSecurity& security,
                                                              absl::Duration timeout) {
  if (address.empty()) return UsageError("--server: the value is empty");
  if (const absl::Status given = ParseServerAddress(address).status(); !given.ok()) {
    return UsageError(absl::StrCat("--server: ", given.message()));
  }
  if (const absl::Status usable = CheckChannelSecurity(address, security); !usable.ok()) return UsageError(usable.message());
  std::shared_ptr<grpc::Channel> channel = MakeChannel(address, security);
  if (!channel->WaitForConnected(DeadlineIn(timeout))) {
    if (security.tls.all()) {
      return absl::UnavailableError(
          absl::StrCat("no coordinator answers at ", address, ", or one whose certificate ", security.tls.authority,
                       " did not sign or that is of another name, or it takes no client with the certificate ", security.tls.certificate));
    }
    return absl::UnavailableError(absl::StrCat("no coordinator answers at ", address, "; start one (quernd --state-dir DIR --listen ",
                                               address, " --allow-root PATH), or name another with --server or QUERN_SERVER"));
  }
  return channel;
}

absl::StatusOr<std::unique_ptr<quern::v1::Jobs::Stub>> ConnectToServer(const std::string& address, const ChannelSecurity& security,
                                                                       absl::Duration timeout) {
  QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, ConnectChannel(address, security, timeout));
  return quern::v1::Jobs::NewStub(channel);
}

absl::Status CallInterruptibly(Interrupt& interrupt, const std::function<grpc::Status(grpc::ClientContext*)>& call) {
  grpc::ClientContext context;
  std::future<grpc::Status> result = std::async(std::launch::async, [&] { return call(&context); });
  while (result.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
    if (interrupt.requested()) context.TryCancel();
  }
  return FromGrpc(result.get());
}

absl::StatusOr<std::string> JobName(const std::string& text) {
  absl::string_view number = text;
  absl::ConsumePrefix(&number, "jobs/");
  uint64_t value = 0;
  const bool digits = number.find_first_not_of("0123456789") == absl::string_view::npos;
  if (digits && absl::SimpleAtoi(number, &value)) return absl::StrCat("jobs/", value);
  return UsageError(absl::StrCat("\"", text, "\" is no name of a job: they are like jobs/7, or 7"));
}

absl::StatusOr<std::string> WorkerName(const std::string& text) {
  absl::string_view name = text;
  absl::ConsumePrefix(&name, "workers/");
  if (const absl::Status status = CheckWorkerName(name); !status.ok()) return UsageError(std::string(status.message()));
  return absl::StrCat("workers/", name);
}

std::string RandomUuid() {
  unsigned char bytes[16];
  size_t have = 0;
  while (have < sizeof(bytes)) {
    const ssize_t n = getrandom(bytes + have, sizeof(bytes) - have, 0);
    if (n > 0) have += n;
  }
  bytes[6] = (bytes[6] & 0x0F) | 0x40;
  bytes[8] = (bytes[8] & 0x3F) | 0x80;
  std::string text;
  for (size_t i = 0; i < sizeof(bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", bytes[i]);
  }
  return text;
}

}  // namespace quern::client
