// Serves figures to Prometheus and health to whoever starts and stops programs, over HTTP: GET /metrics in Prometheus' text format, GET
// /healthz and /readyz. There is neither TLS nor a token: what is served must be no secret, and the address decides who reads it.
#ifndef QUERN_BASE_TELEMETRY_METRICS_SERVER_H_
#define QUERN_BASE_TELEMETRY_METRICS_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/endpoint.h"
#include "base/metrics.h"

namespace quern {

// The address of --metrics-listen: host:port, where an empty host means every interface. INVALID_ARGUMENT for anything else.
absl::StatusOr<Endpoint> ParseMetricsAddress(const std::string& address);

class MetricsServer {
 public:
  // Both are called on threads of the server, at each request, several at a time.
  using Collect = std::function<std::vector<MetricFamily>()>;
  // OK is answered with 200 "ok", anything else with 503 and the message. One that does not return is no answer, which tells as much.
  using Check = std::function<absl::Status()>;
  struct Health {
    Check live;   // /healthz: it is of no use to leave the process as it is
    Check ready;  // /readyz: it does what it is there for
  };

  // Listens. A host name stands for its first IPv4 address, or else its first. An address that cannot be had is told with the system's
  // reason. Blocks on the name service.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address, Collect collect, Health health);
  // Waits for calls that are under way. Requests that are not answered yet are cut off.
  ~MetricsServer();

  // With the port that was chosen in place of a 0.
  const std::string& address() const { return address_; }
  // For the log: where it is, and who can read it.
  std::string Describe() const;

 private:
  class Impl;
  MetricsServer(std::unique_ptr<Impl> impl, std::string address, Endpoint::Kind kind);

  const std::unique_ptr<Impl> impl_;
  const std::string address_;
  const Endpoint::Kind kind_;
};

}  // namespace quern

#endif  // QUERN_BASE_TELEMETRY_METRICS_SERVER_H_
