// The log as JSON, for collectors: one object a line.
#ifndef QUERN_BASE_TELEMETRY_JSON_LOG_H_
#define QUERN_BASE_TELEMETRY_JSON_LOG_H_

#include <memory>
#include <string>

#include "spdlog/formatter.h"

namespace quern {

// {"time": "2026-01-02T03:04:05.678Z", "level": "info", "program": "quernd", "text": "the line as it stands in the text log", ...},
// followed by the line's key=value pairs (base/log_fields.h), all as strings. Bytes that are no UTF-8 are replaced.
std::unique_ptr<spdlog::formatter> NewJsonLogFormatter(std::string program);

}  // namespace quern

#endif  // QUERN_BASE_TELEMETRY_JSON_LOG_H_
