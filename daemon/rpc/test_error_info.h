// Support of the tests of services: what the details of a failed call say.
#ifndef QUERN_DAEMON_RPC_TEST_ERROR_INFO_H_
#define QUERN_DAEMON_RPC_TEST_ERROR_INFO_H_

#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <string>

#include "quern/v1/jobs.pb.h"

namespace quern::daemon {

// The reason of the status' ErrorInfo; "" where it has no details.
inline std::string ReasonIn(const grpc::Status& status) {
  quern::v1::ErrorStatus details;
  quern::v1::ErrorInfo info;
  if (!details.ParseFromString(status.error_details()) || details.details_size() != 1) return "";
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  EXPECT_TRUE(info.ParseFromString(details.details(0).value()));
  return info.reason();
}

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_TEST_ERROR_INFO_H_
