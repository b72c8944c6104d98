#include <errno.h>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

using quern::v1::FailureReason;

TEST(FailureTest, ReasonsFollowTheCode) {
  const std::pair<absl::Status, FailureReason> cases[] = {
      {absl::ResourceExhaustedError("disk full: write f: No space left on device"), quern::v1::DISK_FULL},
      {absl::ResourceExhaustedError("mmap: Cannot allocate memory"), quern::v1::OUT_OF_MEMORY},
      {absl::InvalidArgumentError("NaN"), quern::v1::BAD_INPUT},
      {absl::DataLossError("read f"), quern::v1::IO_ERROR},
      {ErrnoToStatus(ESTALE, "read", "f"), quern::v1::IO_ERROR},
      {absl::NotFoundError("open f"), quern::v1::IO_ERROR},
      {absl::AlreadyExistsError("open f"), quern::v1::OUTPUT_EXISTS},
      {absl::InternalError("x"), quern::v1::INTERNAL},
      {absl::CancelledError("stopped"), quern::v1::FAILURE_REASON_UNSPECIFIED},
  };
  for (const auto& [status, reason] : cases) {
    EXPECT_EQ(FailureOf(status).reason(), reason) << status;
    EXPECT_EQ(FailureOf(status).message(), std::string(status.message()));
  }
}

TEST(FailureTest, APayloadCountsMoreThanTheCodeAndSurvivesAnnotation) {
  const absl::Status status = Annotate(WithFailure(absl::DataLossError("short"), quern::v1::SOURCE_CHANGED), "tensor a");
  EXPECT_EQ(FailureOf(status).reason(), quern::v1::SOURCE_CHANGED);
  EXPECT_EQ(FailureOf(status).message(), "tensor a: short");
  EXPECT_EQ(FailureOf(WithFailure(absl::ResourceExhaustedError("pool"), quern::v1::MEMORY_TOO_SMALL, 77)).bytes_needed(), 77);
}

TEST(FailureTest, OkStaysOk) { QUERN_EXPECT_OK(WithFailure(absl::OkStatus(), quern::v1::INTERNAL)); }

}  // namespace
}  // namespace quern::worker
