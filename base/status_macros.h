// Early return on errors of absl::Status and absl::StatusOr.
#ifndef QUERN_BASE_STATUS_MACROS_H_
#define QUERN_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

// Evaluates `expr` (an absl::Status) once and returns it from the function unless it is OK.
#define QUERN_RETURN_IF_ERROR(expr)                                                     \
  do {                                                                                  \
    if (absl::Status quern_status_ = (expr); !quern_status_.ok()) return quern_status_; \
  } while (false)

#define QUERN_MACRO_CONCAT_INNER_(a, b) a##b
#define QUERN_MACRO_CONCAT_(a, b) QUERN_MACRO_CONCAT_INNER_(a, b)

// QUERN_ASSIGN_OR_RETURN(auto x, StatusOrExpression()): binds the value or returns the error.
#define QUERN_ASSIGN_OR_RETURN(lhs, expr) QUERN_ASSIGN_OR_RETURN_IMPL_(QUERN_MACRO_CONCAT_(quern_statusor_, __LINE__), lhs, expr)
#define QUERN_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr)  \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = *std::move(statusor)

namespace quern {

// Puts "<context>: " before the message of an error, keeping its code and payloads. OK stays OK.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
}

}  // namespace quern

#endif  // QUERN_BASE_STATUS_MACROS_H_
