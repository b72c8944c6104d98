// GoogleTest matchers for absl::Status: EXPECT_THAT(s, IsOk()), EXPECT_THAT(f(), StatusIs(code, HasSubstr("..."))), IsOkAndHolds(m).
#ifndef QUERN_BASE_STATUS_MATCHERS_H_
#define QUERN_BASE_STATUS_MATCHERS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace quern {

inline constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;  // what most refusals are

inline const absl::Status& ToStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& ToStatus(const absl::StatusOr<T>& status) {
  return status.status();
}

MATCHER(IsOk, "") {
  *result_listener << ToStatus(arg).ToString();
  return ToStatus(arg).ok();
}

MATCHER_P(StatusIs, code, "") {
  *result_listener << ToStatus(arg).ToString();
  return ToStatus(arg).code() == code;
}

MATCHER_P2(StatusIs, code, message, "") {
  *result_listener << ToStatus(arg).ToString();
  return ToStatus(arg).code() == code && testing::ExplainMatchResult(message, std::string(ToStatus(arg).message()), result_listener);
}

MATCHER_P(IsOkAndHolds, value, "") {
  if (!arg.ok()) {
    *result_listener << arg.status().ToString();
    return false;
  }
  return testing::ExplainMatchResult(value, *arg, result_listener);
}

}  // namespace quern

#define QUERN_ASSERT_OK(expr) ASSERT_THAT(expr, ::quern::IsOk())
#define QUERN_EXPECT_OK(expr) EXPECT_THAT(expr, ::quern::IsOk())
#define QUERN_ASSERT_OK_AND_ASSIGN(lhs, expr) \
  QUERN_ASSERT_OK_AND_ASSIGN_IMPL_(QUERN_TEST_CONCAT_(quern_test_statusor_, __LINE__), lhs, expr)
#define QUERN_TEST_CONCAT_INNER_(a, b) a##b
#define QUERN_TEST_CONCAT_(a, b) QUERN_TEST_CONCAT_INNER_(a, b)
#define QUERN_ASSERT_OK_AND_ASSIGN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                     \
  ASSERT_THAT(statusor, ::quern::IsOk());                     \
  lhs = *std::move(statusor)

#endif  // QUERN_BASE_STATUS_MATCHERS_H_
