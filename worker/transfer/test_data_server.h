// A coordinator's data plane for tests: files in memory, and connections that break when the test wants it.
#ifndef QUERN_WORKER_TRANSFER_TEST_DATA_SERVER_H_
#define QUERN_WORKER_TRANSFER_TEST_DATA_SERVER_H_

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/string_view.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/link/frame.h"
#include "base/link/ticket.h"
#include "base/mutex.h"
#include "quern/v1/data.grpc.pb.h"
#include "quern/v1/jobs.pb.h"

namespace quern::worker {

class TestDataServer : public quern::v1::Data::Service {
 public:
  struct Plan {
    std::map<std::string, std::string> files = {};
    uint64_t chunk = 64 << 10;
    uint64_t break_after = UINT64_MAX;  // bytes that one connection carries before it breaks
    int garble = 0;                     // so many chunks are sent with another byte than their digest says
    grpc::Status refuse = {};           // the end of every call, unless it is OK
    bool acknowledge = true;            // of uploads, before the file is complete
    uint64_t lose = 0;                  // bytes of the shard that are gone when it is asked for again
  };
  struct Counts {
    uint64_t calls = 0;   // for connections
    uint64_t bytes = 0;   // of chunks sent or taken
    uint64_t ranges = 0;  // asked for
  };

  // The calls at unix:`socket_path`, the connections at unix:DataSocket(socket_path).
  TestDataServer(const std::string& socket_path, Plan plan) : plan_(std::move(plan)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    const std::string path = DataSocket(socket_path);
    RemoveFile(path).IgnoreError();
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    listener_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    listen(listener_.get(), 16);
    acceptor_ = std::thread([this] { Accept(); });
    server_ = builder.BuildAndStart();
  }
  ~TestDataServer() override {
    server_->Shutdown(std::chrono::system_clock::now());
    shutdown(listener_.get(), SHUT_RDWR);
    acceptor_.join();
    for (Open& open : open_) {
      open.connection.Shutdown();
      open.thread.join();
    }
  }
  static std::string DataSocket(const std::string& socket_path) { return socket_path + ".data"; }

  Counts counts() {
    MutexLock lock(&mutex_);
    return counts_;
  }
  std::string shard() {
    MutexLock lock(&mutex_);
    return shard_;
  }
  bool finished() {
    MutexLock lock(&mutex_);
    return finished_;
  }
  void Heal() {
    MutexLock lock(&mutex_);
    plan_.break_after = UINT64_MAX;
  }

  static grpc::Status WithReason(grpc::StatusCode code, const std::string& message, const std::string& reason) {
    quern::v1::ErrorInfo info;
    info.set_reason(reason);
    quern::v1::ErrorStatus details;
    details.add_details()->set_value(info.SerializeAsString());
    return grpc::Status(code, message, details.SerializeAsString());
  }

  grpc::Status CheckSource(grpc::ServerContext*, const quern::v1::CheckSourceRequest* request,
                           quern::v1::CheckSourceResponse* response) override {
    MutexLock lock(&mutex_);
    if (!plan_.refuse.ok()) return plan_.refuse;
    for (const std::string& path : request->paths()) {
      if (plan_.files.count(path) == 0) return grpc::Status(grpc::StatusCode::NOT_FOUND, path);
      response->add_sizes(plan_.files[path].size());
    }
    return grpc::Status::OK;
  }

  grpc::Status ReadSource(grpc::ServerContext*, const quern::v1::ReadSourceRequest*, quern::v1::ReadSourceResponse* response) override {
    MutexLock lock(&mutex_);
    ++counts_.calls;
    if (!plan_.refuse.ok()) return plan_.refuse;
    response->set_ticket(Admit([this](LinkConnection& connection) { SendSource(connection); }));
    return grpc::Status::OK;
  }

  grpc::Status WriteShard(grpc::ServerContext*, const quern::v1::WriteShardRequest* request,
                          quern::v1::WriteShardResponse* response) override {
    MutexLock lock(&mutex_);
    if (++counts_.calls > 1) shard_.resize(shard_.size() - std::min<uint64_t>(plan_.lose, shard_.size()));
    if (!plan_.refuse.ok()) return plan_.refuse;
    response->set_durable(shard_.size());
    response->set_ticket(Admit([this, every = request->sync_every()](LinkConnection& connection) { TakeShard(every, connection); }));
    return grpc::Status::OK;
  }

 private:
  using Serve = std::function<void(LinkConnection&)>;
  struct Open {
    explicit Open(UniqueFd fd) : connection(std::move(fd)) {}
    LinkConnection connection;
    std::thread thread;
  };

  std::string Admit(Serve serve) QUERN_REQUIRES(mutex_) {
    std::string ticket = NewTicket();
    tickets_[ticket] = std::move(serve);
    return ticket;
  }
  void Accept() {
    while (true) {
      UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!fd) return;
      Open& open = open_.emplace_back(std::move(fd));
      open.thread = std::thread([this, &open] {
        Run(open.connection);
        open.connection.Shutdown();
      });
    }
  }
  void Run(LinkConnection& connection) {
    std::string greeting(kGreetingSize, '\0'), ticket(kTicketSize, '\0');
    if (!connection.Read(greeting.data(), greeting.size()).value_or(false) ||
        !connection.Read(ticket.data(), ticket.size()).value_or(false)) {
      return;
    }
    Serve serve;
    {
      MutexLock lock(&mutex_);
      if (TicketNameIn(greeting) == NameOfTicket(ticket)) serve = std::exchange(tickets_[ticket], nullptr);
    }
    if (serve != nullptr) serve(connection);
  }
  // Nothing at the end of the client's side, or of its patience.
  static std::optional<LinkFrame> Next(LinkConnection& connection, std::string* payload) {
    const absl::StatusOr<std::optional<LinkFrame>> frame = ReadFrameHead(connection);
    if (!frame.ok() || !frame->has_value()) return std::nullopt;
    payload->resize((*frame)->size);
    if (!ReadPayload(connection, payload->data(), payload->size()).ok()) return std::nullopt;
    return **frame;
  }
  static bool Write(LinkConnection& connection, LinkFrame frame, absl::string_view payload) {
    std::string bytes;
    AppendFrame(frame, payload, &bytes);
    return connection.Write(bytes.data(), bytes.size()).ok();
  }

  void SendSource(LinkConnection& connection) {
    std::string path, payload;
    uint64_t left = BreakAfter();
    while (const std::optional<LinkFrame> range = Next(connection, &payload)) {
      if (!payload.empty()) path = payload;
      for (uint64_t done = 0; done < range->length;) {
        LinkFrame chunk;
        const std::string data = MakeChunk(path, *range, done, &chunk);
        if (data.size() > left) return;
        left -= data.size();
        done += data.size();
        if (!Write(connection, chunk, data)) return;
      }
      MutexLock lock(&mutex_);
      ++counts_.ranges;
    }
  }
  std::string MakeChunk(const std::string& path, const LinkFrame& range, uint64_t done, LinkFrame* chunk) {
    MutexLock lock(&mutex_);
    std::string data = plan_.files.at(path).substr(range.offset + done, std::min(plan_.chunk, range.length - done));
    *chunk = {
        .kind = LinkFrame::Kind::kChunk, .range = range.range, .offset = range.offset + done, .xxh3 = Xxh3Of(data.data(), data.size())};
    counts_.bytes += data.size();
    if (plan_.garble > 0) {
      --plan_.garble;
      data[0] ^= 1;
    }
    return data;
  }

  void TakeShard(uint64_t every, LinkConnection& connection) {
    std::string data;
    uint64_t left = BreakAfter(), synced;
    {
      MutexLock lock(&mutex_);
      synced = shard_.size();
    }
    while (const std::optional<LinkFrame> frame = Next(connection, &data)) {
      LinkFrame answer{.kind = LinkFrame::Kind::kFinished};
      {
        MutexLock lock(&mutex_);
        if (frame->kind == LinkFrame::Kind::kChunk) {
          if (data.size() > left || frame->offset != shard_.size() || Xxh3Of(data.data(), data.size()) != frame->xxh3) return;
          left -= data.size();
          counts_.bytes += data.size();
          shard_ += data;
          if (!plan_.acknowledge || shard_.size() - synced < every) continue;
          synced = shard_.size();
          answer.kind = LinkFrame::Kind::kDurable;
        } else {
          finished_ = true;
        }
        answer.offset = shard_.size();
      }
      if (!Write(connection, answer, "")) return;
    }
  }
  uint64_t BreakAfter() {
    MutexLock lock(&mutex_);
    return plan_.break_after;
  }

  std::unique_ptr<grpc::Server> server_;
  Mutex mutex_;
  Plan plan_ QUERN_GUARDED_BY(mutex_);
  Counts counts_ QUERN_GUARDED_BY(mutex_);
  std::string shard_ QUERN_GUARDED_BY(mutex_);
  bool finished_ QUERN_GUARDED_BY(mutex_) = false;
  std::map<std::string, Serve> tickets_ QUERN_GUARDED_BY(mutex_);
  UniqueFd listener_;
  std::list<Open> open_;  // of the accepting thread, as long as it runs
  std::thread acceptor_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_TEST_DATA_SERVER_H_
