#include "base/telemetry/json_log.h"

#include <utility>

#include "absl/time/time.h"
#include "base/log_fields.h"
#include "nlohmann/json.hpp"
#include "spdlog/details/log_msg.h"

namespace quern {
namespace {

class JsonFormatter : public spdlog::formatter {
 public:
  explicit JsonFormatter(std::string program) : program_(std::move(program)) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const auto level = spdlog::level::to_string_view(message.level);
    const std::string text(message.payload.data(), message.payload.size());
    nlohmann::ordered_json line = {{"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::FromChrono(message.time), absl::UTCTimeZone())},
                                   {"level", std::string(level.data(), level.size())},
                                   {"program", program_},
                                   {"text", text}};
    for (auto& [key, value] : ParseLogFields(text)) {
      if (!line.contains(key)) line[key] = std::move(value);
    }
    const std::string json = line.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::ordered_json::error_handler_t::replace);
    out.append(json.data(), json.data() + json.size());
    out.push_back('\n');
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<JsonFormatter>(program_); }

 private:
  const std::string program_;
};

}  // namespace

std::unique_ptr<spdlog::formatter> NewJsonLogFormatter(std::string program) { return std::make_unique<JsonFormatter>(std::move(program)); }

}  // namespace quern
