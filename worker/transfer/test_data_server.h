// A coordinator's data plane for tests: files in memory, and connections that break when the test wants it.
#ifndef QUERN_WORKER_TRANSFER_TEST_DATA_SERVER_H_
#define QUERN_WORKER_TRANSFER_TEST_DATA_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "base/digest.h"
#include "base/mutex.h"
#include "quern/v1/data.grpc.pb.h"
#include "quern/v1/jobs.pb.h"

namespace quern::worker {

class TestDataServer : public quern::v1::Data::Service {
 public:
  struct Plan {
    std::map<std::string, std::string> files = {};
    uint64_t chunk = 64 << 10;
    uint64_t break_after = UINT64_MAX;  // bytes that one stream carries before it ends with UNAVAILABLE
    int garble = 0;                     // so many chunks are sent with another byte than their digest says
    grpc::Status refuse = {};           // the end of every call, unless it is OK
    bool acknowledge = true;            // of uploads, before the file is complete
    uint64_t lose = 0;                  // bytes of the shard that are gone when a second stream opens it
  };
  struct Counts {
    uint64_t streams = 0;
    uint64_t bytes = 0;     // of chunks sent or taken
    uint64_t ranges = 0;    // asked for
    uint64_t messages = 0;  // of ranges
  };

  TestDataServer(const std::string& socket_path, Plan plan) : plan_(std::move(plan)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~TestDataServer() override { server_->Shutdown(std::chrono::system_clock::now()); }

  Counts counts() {
    MutexLock lock(&mutex_);
    return counts_;
  }
  std::string shard() {
    MutexLock lock(&mutex_);
    return shard_;
  }
  std::string finished() {
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

  grpc::Status ReadSource(grpc::ServerContext*,
                          grpc::ServerReaderWriter<quern::v1::ReadSourceResponse, quern::v1::ReadSourceRequest>* stream) override {
    BeginStream();
    quern::v1::ReadSourceRequest request;
    std::string path;
    uint64_t left = BreakAfter();
    while (stream->Read(&request)) {
      Count(request);
      for (const quern::v1::ReadSourceRequest::Range& range : request.ranges()) {
        if (!range.path().empty()) path = range.path();
        for (uint64_t done = 0; done < range.size();) {
          quern::v1::ReadSourceResponse response;
          grpc::Status refused = MakeChunk(path, range, done, response.add_chunks());
          if (!refused.ok()) return refused;
          const uint64_t size = response.chunks(0).data().size();
          if (size > left) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the link broke");
          left -= size;
          done += size;
          stream->Write(response);
        }
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status WriteShard(grpc::ServerContext*,
                          grpc::ServerReaderWriter<quern::v1::WriteShardResponse, quern::v1::WriteShardRequest>* stream) override {
    BeginStream();
    quern::v1::WriteShardRequest request;
    if (!stream->Read(&request)) return grpc::Status::OK;
    uint64_t left = BreakAfter();
    uint64_t synced = 0, every = request.open().sync_every();
    quern::v1::WriteShardResponse response;
    {
      MutexLock lock(&mutex_);
      if (!plan_.refuse.ok()) return plan_.refuse;
      if (counts_.streams > 1) shard_.resize(shard_.size() - std::min<uint64_t>(plan_.lose, shard_.size()));
      synced = shard_.size();
      response.set_durable(synced);
    }
    stream->Write(response);
    while (stream->Read(&request)) {
      MutexLock lock(&mutex_);
      if (request.has_chunk()) {
        const std::string& data = request.chunk().data();
        if (data.size() > left) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the link broke");
        left -= data.size();
        if (request.chunk().offset() != shard_.size() || Xxh3Of(data.data(), data.size()) != request.chunk().xxh3()) {
          return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "these are not the next bytes");
        }
        counts_.bytes += data.size();
        shard_ += data;
        if (!plan_.acknowledge || shard_.size() - synced < every) continue;
        synced = shard_.size();
        response.set_durable(synced);
      } else {
        finished_ = request.finish();
        response.set_durable(shard_.size());
        response.set_finished(true);
      }
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

 private:
  void BeginStream() {
    MutexLock lock(&mutex_);
    ++counts_.streams;
  }
  uint64_t BreakAfter() {
    MutexLock lock(&mutex_);
    return plan_.break_after;
  }
  void Count(const quern::v1::ReadSourceRequest& request) {
    MutexLock lock(&mutex_);
    counts_.ranges += request.ranges_size();
    ++counts_.messages;
  }
  grpc::Status MakeChunk(const std::string& path, const quern::v1::ReadSourceRequest::Range& range, uint64_t done,
                         quern::v1::Chunk* chunk) {
    MutexLock lock(&mutex_);
    if (!plan_.refuse.ok()) return plan_.refuse;
    const std::string& file = plan_.files.at(path);
    chunk->set_range(range.number());
    chunk->set_offset(range.offset() + done);
    chunk->set_data(file.substr(range.offset() + done, std::min(plan_.chunk, range.size() - done)));
    chunk->set_xxh3(Xxh3Of(chunk->data().data(), chunk->data().size()));
    counts_.bytes += chunk->data().size();
    if (plan_.garble > 0) {
      --plan_.garble;
      (*chunk->mutable_data())[0] ^= 1;
    }
    return grpc::Status::OK;
  }

  std::unique_ptr<grpc::Server> server_;
  Mutex mutex_;
  Plan plan_ QUERN_GUARDED_BY(mutex_);
  Counts counts_ QUERN_GUARDED_BY(mutex_);
  std::string shard_ QUERN_GUARDED_BY(mutex_);
  std::string finished_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_TRANSFER_TEST_DATA_SERVER_H_
