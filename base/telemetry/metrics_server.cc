#include "base/telemetry/metrics_server.h"

#include <CivetServer.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include <chrono>
#include <exception>
#include <future>
#include <limits>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace quern {
namespace {

constexpr std::chrono::milliseconds kKnock{10};

prometheus::MetricType TypeOf(MetricFamily::Kind kind) {
  switch (kind) {
    case MetricFamily::Kind::kCounter:
      return prometheus::MetricType::Counter;
    case MetricFamily::Kind::kGauge:
      return prometheus::MetricType::Gauge;
    case MetricFamily::Kind::kHistogram:
      return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

prometheus::ClientMetric::Histogram ToPrometheus(const Histogram::Snapshot& snapshot) {
  prometheus::ClientMetric::Histogram histogram;
  for (size_t i = 0; i < snapshot.counts.size(); ++i) {
    histogram.sample_count += snapshot.counts[i];
    const double bound = i < snapshot.bounds.size() ? snapshot.bounds[i] : std::numeric_limits<double>::infinity();
    histogram.bucket.push_back({.cumulative_count = histogram.sample_count, .upper_bound = bound});
  }
  histogram.sample_sum = snapshot.sum;
  return histogram;
}

std::string PrometheusText(std::vector<MetricFamily> families) {
  std::vector<prometheus::MetricFamily> out;
  for (MetricFamily& family : families) {
    prometheus::MetricFamily& converted = out.emplace_back();
    converted.name = std::move(family.name);
    converted.help = std::move(family.help);
    converted.type = TypeOf(family.kind);
    for (MetricFamily::Sample& sample : family.samples) {
      prometheus::ClientMetric& metric = converted.metric.emplace_back();
      for (auto& [name, value] : sample.labels) metric.label.push_back({name, std::move(value)});
      metric.counter.value = metric.gauge.value = sample.value;
      if (family.kind == MetricFamily::Kind::kHistogram) metric.histogram = ToPrometheus(sample.histogram);
    }
  }
  return static_cast<const prometheus::Serializer&>(prometheus::TextSerializer()).Serialize(out);
}

struct Answer {
  const char* status;
  std::string body;
};

// What is served under one path.
class Page : public CivetHandler {
 public:
  explicit Page(std::function<Answer()> answer) : answer_(std::move(answer)) {}

  bool handleGet(CivetServer*, mg_connection* connection) override {
    const Answer answer = answer_();
    const std::string text = absl::StrCat(
        "HTTP/1.1 ", answer.status, "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: ", answer.body.size(),
        "\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n", answer.body);
    mg_write(connection, text.data(), text.size());
    return true;
  }

 private:
  const std::function<Answer()> answer_;
};

Page CheckPage(MetricsServer::Check check) {
  return Page([check = std::move(check)]() -> Answer {
    const absl::Status status = check();
    if (status.ok()) return {"200 OK", "ok\n"};
    return {"503 Service Unavailable", absl::StrCat(status.message(), "\n")};
  });
}

struct NumericAddress {
  sockaddr_storage socket;
  socklen_t size;
  int family;
  std::string host;  // in brackets where it must be
};

absl::StatusOr<NumericAddress> Resolve(const Endpoint& endpoint, const std::string& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(endpoint.host.empty() ? nullptr : endpoint.host.c_str(), absl::StrCat(endpoint.port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", gai_strerror(error)));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, freeaddrinfo);
  const addrinfo* chosen = found;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (one->ai_family == AF_INET) {
      chosen = one;
      break;
    }
  }
  NumericAddress numeric = {};
  numeric.size = chosen->ai_addrlen;
  numeric.family = chosen->ai_family;
  memcpy(&numeric.socket, chosen->ai_addr, chosen->ai_addrlen);
  char host[NI_MAXHOST];
  if (const int failed = getnameinfo(chosen->ai_addr, chosen->ai_addrlen, host, sizeof(host), nullptr, 0, NI_NUMERICHOST); failed != 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", gai_strerror(failed)));
  }
  numeric.host = chosen->ai_family == AF_INET6 ? absl::StrCat("[", host, "]") : host;
  return numeric;
}

// Why the address cannot be listened on; OK when it can. civetweb itself does not tell.
absl::Status TryAddress(const NumericAddress& numeric, const std::string& address) {
  const UniqueFd fd(socket(numeric.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&numeric.socket), numeric.size) != 0 || listen(fd.get(), 1) != 0) {
    return ErrnoToStatus(errno, "cannot listen on", address);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Endpoint> ParseMetricsAddress(const std::string& address) {
  QUERN_ASSIGN_OR_RETURN(Endpoint endpoint, ParseEndpoint(address));
  if (endpoint.kind == Endpoint::Kind::kUnix) {
    return absl::InvalidArgumentError(absl::StrCat(address, ": Prometheus reads no unix sockets: give host:port"));
  }
  return endpoint;
}

class MetricsServer::Impl {
 public:
  Impl(const NumericAddress& numeric, uint16_t port, Collect collect, Health health)
      : metrics_([collect = std::move(collect)] {
          return Answer{"200 OK", PrometheusText(collect())};
        }),
        live_(CheckPage(std::move(health.live))),
        ready_(CheckPage(std::move(health.ready))),
        // Whoever holds a connection open without a word keeps one of the threads for the time of the request's timeout.
        server_(std::make_unique<CivetServer>(std::vector<std::string>{"listening_ports", absl::StrCat(numeric.host, ":", port),
                                                                       "num_threads", "4", "request_timeout_ms", "2000"})),
        own_(numeric) {
    server_->addHandler("/metrics", metrics_);
    server_->addHandler("/healthz", live_);
    server_->addHandler("/readyz", ready_);
    const uint16_t bound = htons(static_cast<uint16_t>(this->port()));
    if (own_.family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&own_.socket)->sin6_port = bound;
    } else {
      reinterpret_cast<sockaddr_in*>(&own_.socket)->sin_port = bound;
    }
  }
  ~Impl() {
    std::promise<void> stopped;
    std::future<void> end = stopped.get_future();
    std::thread stop([this, &stopped] {
      server_.reset();
      stopped.set_value();
    });
    // civetweb looks every two seconds whether it is to stop, and whenever somebody connects.
    do {
      Knock();
    } while (end.wait_for(kKnock) == std::future_status::timeout);
    stop.join();
  }
  int port() const { return server_->getListeningPorts().at(0); }

 private:
  void Knock() const {
    const UniqueFd fd(socket(own_.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    // Whether it gets through does not matter: it knocks again.
    if (fd) static_cast<void>(connect(fd.get(), reinterpret_cast<const sockaddr*>(&own_.socket), own_.size));
  }

  Page metrics_, live_, ready_;
  std::unique_ptr<CivetServer> server_;
  NumericAddress own_;
};

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl, std::string address, Endpoint::Kind kind)
    : impl_(std::move(impl)), address_(std::move(address)), kind_(kind) {}

MetricsServer::~MetricsServer() = default;

std::string MetricsServer::Describe() const {
  return absl::StrCat(
      "metrics on http://", address_, "/metrics",
      kind_ == Endpoint::Kind::kRemote ? " (other machines can read them: in the clear, and without being asked who they are)" : "");
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address, Collect collect, Health health) {
  QUERN_ASSIGN_OR_RETURN(const Endpoint endpoint, ParseMetricsAddress(address));
  QUERN_ASSIGN_OR_RETURN(const NumericAddress numeric, Resolve(endpoint, address));
  QUERN_RETURN_IF_ERROR(TryAddress(numeric, address));
  try {
    auto impl = std::make_unique<Impl>(numeric, endpoint.port, std::move(collect), std::move(health));
    std::string bound = absl::StrCat(address.substr(0, address.rfind(':') + 1), impl->port());
    return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl), std::move(bound), endpoint.kind));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", error.what()));
  }
}

}  // namespace quern
