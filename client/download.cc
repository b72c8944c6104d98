#include "client/download.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/byte_size.h"
#include "base/channel/await_connected.h"
#include "base/digest.h"
#include "base/direct_writer.h"
#include "base/file.h"
#include "base/link/dial.h"
#include "base/link/frame.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/connection.h"

namespace quern::client {
namespace {

using quern::v1::ListResultResponse;

constexpr absl::string_view kPart = ".part";
constexpr absl::Duration kConnectPatience = absl::Seconds(5);
constexpr std::chrono::milliseconds kInterruptPoll(50);

class RemoteResultSource : public ResultSource {
 public:
  RemoteResultSource(std::shared_ptr<grpc::Channel> channel, const std::string& server, const TlsFiles& tls, std::string job,
                     Interrupt* interrupt)
      : channel_(std::move(channel)),
        stub_(quern::v1::Data::NewStub(channel_)),
        dialer_(server, tls),
        job_(std::move(job)),
        interrupt_(interrupt) {}

  absl::StatusOr<ListResultResponse> List() override {
    quern::v1::ListResultRequest request;
    request.set_job(job_);
    ListResultResponse response;
    QUERN_RETURN_IF_ERROR(
        CallInterruptibly(*interrupt_, [&](grpc::ClientContext* context) { return stub_->ListResult(context, request, &response); }));
    return response;
  }

  absl::Status Read(const std::string& name, uint64_t offset, const std::function<absl::Status(ResultChunk&)>& take) override {
    quern::v1::ReadResultRequest request;
    request.set_job(job_);
    request.set_name(name);
    request.set_offset(offset);
    quern::v1::ReadResultResponse response;
    const auto wanted = [this] { return !interrupt_->requested(); };
    AwaitConnected(*channel_, kConnectPatience, wanted);
    QUERN_RETURN_IF_ERROR(
        CallInterruptibly(*interrupt_, [&](grpc::ClientContext* context) { return stub_->ReadResult(context, request, &response); }));
    QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<LinkConnection> connection, dialer_.Dial(response.ticket(), kConnectPatience, wanted));
    std::future<absl::Status> reading = std::async(std::launch::async, [&] { return ReadChunks(*connection, take); });
    while (reading.wait_for(kInterruptPoll) != std::future_status::ready) {
      if (interrupt_->requested()) connection->Shutdown();
    }
    const absl::Status status = reading.get();
    return interrupt_->requested() ? absl::CancelledError("interrupted") : status;
  }

 private:
  absl::Status ReadChunks(LinkConnection& connection, const std::function<absl::Status(ResultChunk&)>& take) {
    while (true) {
      QUERN_ASSIGN_OR_RETURN(const std::optional<LinkFrame> frame, ReadFrameHead(connection));
      if (!frame.has_value()) return absl::UnavailableError("the coordinator ended the connection");
      chunk_.data.resize(frame->size);
      QUERN_RETURN_IF_ERROR(ReadPayload(connection, chunk_.data.data(), chunk_.data.size()));
      if (frame->kind == LinkFrame::Kind::kEnd) return FromErrorStatus(chunk_.data);
      if (frame->kind != LinkFrame::Kind::kChunk) return absl::AbortedError("what came is no part of a file");
      chunk_.offset = frame->offset;
      chunk_.xxh3 = frame->xxh3;
      QUERN_RETURN_IF_ERROR(take(chunk_));
    }
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<quern::v1::Data::StubInterface> stub_;
  LinkDialer dialer_;
  const std::string job_;
  Interrupt* const interrupt_;
  ResultChunk chunk_;  // its memory is used again
};

// Names come from another machine: they stay below the directory.
absl::Status CheckNames(const ListResultResponse& list) {
  for (const ListResultResponse::File& file : list.files()) {
    bool plain = !absl::EndsWith(file.name(), kPart) && file.name().find('\0') == std::string::npos;
    for (const absl::string_view part : absl::StrSplit(file.name(), '/')) plain &= !part.empty() && part != "." && part != "..";
    if (!plain) return absl::DataLossError(absl::StrCat("the coordinator names a file \"", file.name(), "\", which is no plain name"));
    if (file.sha256().size() != Sha256::kSize) return absl::DataLossError(absl::StrCat("the coordinator has no SHA-256 of ", file.name()));
  }
  return absl::OkStatus();
}

// The SHA-256 of the first `size` bytes.
absl::Status HashPrefix(int fd, uint64_t size, const std::string& path, Sha256* sha) {
  std::string buffer(std::min<uint64_t>(size, kMiB), '\0');
  for (uint64_t offset = 0; offset < size; offset += buffer.size()) {
    const uint64_t part = std::min<uint64_t>(buffer.size(), size - offset);
    QUERN_RETURN_IF_ERROR(ReadExactly(fd, offset, buffer.data(), part, path));
    sha->Update(buffer.data(), part);
  }
  return absl::OkStatus();
}

// Whether the file is there with this content; nothing when there is none of that name.
absl::StatusOr<std::optional<bool>> IsThere(const std::string& path, const ListResultResponse::File& file) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return std::optional<bool>();
    return ErrnoToStatus(errno, "stat", path);
  }
  if (!S_ISREG(info.st_mode) || static_cast<uint64_t>(info.st_size) != file.size()) return std::optional<bool>(false);
  QUERN_ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY | O_NOFOLLOW));
  Sha256 sha;
  QUERN_RETURN_IF_ERROR(HashPrefix(fd.get(), file.size(), path, &sha));
  return std::optional<bool>(sha.Finish() == file.sha256());
}

// Work on a thread of its own, one piece at a time: the next chunk comes meanwhile.
class OneAhead {
 public:
  OneAhead() : thread_([this] { Run(); }) {}
  ~OneAhead() {
    {
      MutexLock lock(&mutex_);
      stop_ = true;
      changed_.SignalAll();
    }
    thread_.join();
  }

  // After Wait. What is left at the end is still done.
  void Start(std::function<void()> work) {
    MutexLock lock(&mutex_);
    work_ = std::move(work);
    changed_.SignalAll();
  }
  // Until nothing is under way: what it works on may be touched again.
  void Wait() {
    MutexLock lock(&mutex_);
    while (work_ != nullptr) changed_.Wait(&mutex_);
  }

 private:
  void Run() {
    while (true) {
      std::function<void()>* work;
      {
        MutexLock lock(&mutex_);
        while (work_ == nullptr && !stop_) changed_.Wait(&mutex_);
        if (work_ == nullptr) return;
        work = &work_;
      }
      (*work)();
      MutexLock lock(&mutex_);
      work_ = nullptr;
      changed_.SignalAll();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::function<void()> work_ QUERN_GUARDED_BY(mutex_);
  bool stop_ QUERN_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// rename(2), but never over another file.
absl::Status RenameToNew(const std::string& from, const std::string& to) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return absl::OkStatus();
  if (errno != EINVAL && errno != ENOSYS) return ErrnoToStatus(errno, "rename", to);
  // A filesystem without that, such as NFS.
  if (link(from.c_str(), to.c_str()) != 0) return ErrnoToStatus(errno, "link", to);
  return RemoveFile(from);
}

// One file that is not here yet.
class FileDownload {
 public:
  FileDownload(ResultSource* source, const ListResultResponse::File* file, std::string path, const DownloadOptions* options,
               std::function<void(uint64_t)> progress)
      : source_(*source),
        file_(*file),
        path_(std::move(path)),
        part_(absl::StrCat(path_, kPart)),
        options_(*options),
        progress_(std::move(progress)) {}

  absl::Status Run() {
    QUERN_RETURN_IF_ERROR(MakeDirectories(DirName(path_)));
    QUERN_RETURN_IF_ERROR(Open());
    const bool resumed = have_ > 0;
    QUERN_RETURN_IF_ERROR(Fetch());
    if (sha_->Finish() != file_.sha256()) {
      // What was here may be of another result.
      if (!resumed) return Wrong();
      QUERN_RETURN_IF_ERROR(StartOver());
      QUERN_RETURN_IF_ERROR(Fetch());
      if (sha_->Finish() != file_.sha256()) return Wrong();
    }
    if (fsync(fd_.get()) != 0) return ErrnoToStatus(errno, "fsync", part_);
    QUERN_RETURN_IF_ERROR(RenameToNew(part_, path_));
    QUERN_RETURN_IF_ERROR(fd_.Close(path_));
    return SyncDirectory(DirName(path_));
  }

 private:
  absl::Status Open() {
    QUERN_ASSIGN_OR_RETURN(fd_, OpenFile(part_, O_RDWR | O_CREAT | O_NOFOLLOW));
    if (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) return absl::FailedPreconditionError(absl::StrCat(part_, " is being fetched by another command"));
      return ErrnoToStatus(errno, "flock", part_);
    }
    struct stat info;
    if (fstat(fd_.get(), &info) != 0) return ErrnoToStatus(errno, "stat", part_);
    have_ = static_cast<uint64_t>(info.st_size);
    if (have_ > file_.size()) return StartOver();
    sha_.emplace();
    return HashPrefix(fd_.get(), have_, part_, &*sha_);
  }

  absl::Status StartOver() {
    if (ftruncate(fd_.get(), 0) != 0) return ErrnoToStatus(errno, "truncate", part_);
    have_ = 0;
    sha_.emplace();
    return absl::OkStatus();
  }

  absl::Status Wrong() {
    RemoveFile(part_).IgnoreError();  // it is of no use to anybody; the error below is the one to tell
    return absl::DataLossError(
        absl::StrCat(file_.name(), ": what came does not have the SHA-256 ", HexDigest(file_.sha256()), ": verify the result where it is"));
  }

  absl::Status Fetch() {
    const absl::Status fetched = FetchChunks();
    hashing_.Wait();
    return fetched;
  }

  absl::Status FetchChunks() {
    absl::Duration pause = options_.first_pause;
    absl::Duration moved = options_.clock->Monotonic();
    progress_(have_);
    while (have_ < file_.size()) {
      const absl::Status status = source_.Read(file_.name(), have_, [&](ResultChunk& chunk) {
        QUERN_RETURN_IF_ERROR(Take(chunk));
        pause = options_.first_pause;
        moved = options_.clock->Monotonic();
        return absl::OkStatus();
      });
      writing_.Wait();
      QUERN_RETURN_IF_ERROR(written_);
      if (have_ == file_.size()) break;
      if (!status.ok() && !absl::IsUnavailable(status) && !absl::IsInternal(status) && !absl::IsUnknown(status) &&
          !absl::IsAborted(status) && !absl::IsDeadlineExceeded(status) && !absl::IsResourceExhausted(status)) {
        return status;
      }
      if (options_.clock->Monotonic() - moved >= options_.give_up) {
        return absl::UnavailableError(absl::StrCat("nothing has come for ", absl::FormatDuration(options_.give_up), " (",
                                                   status.ok() ? "the file ended early" : std::string(status.message()),
                                                   "); run the same command again to go on"));
      }
      if (!options_.wait(pause)) return absl::CancelledError("interrupted; run the same command again to go on");
      pause = std::min(2 * pause, options_.longest_pause);
    }
    return absl::OkStatus();
  }

  absl::Status Take(ResultChunk& chunk) {
    std::string& data = chunk.data;
    if (chunk.offset != have_ || data.empty() || data.size() > file_.size() - have_ || Xxh3Of(data.data(), data.size()) != chunk.xxh3) {
      return absl::AbortedError(absl::StrCat(file_.name(), ": the bytes at ", have_, " came garbled"));
    }
    writing_.Wait();
    QUERN_RETURN_IF_ERROR(written_);
    hashing_.Wait();
    data_.swap(data);
    writing_.Start([this, offset = have_] { written_ = writer_.Write(fd_.get(), offset, data_.data(), data_.size(), part_); });
    hashing_.Start([this] { sha_->Update(data_); });
    have_ += data_.size();
    progress_(have_);
    return absl::OkStatus();
  }

  ResultSource& source_;
  const ListResultResponse::File& file_;
  const std::string path_;
  const std::string part_;
  const DownloadOptions& options_;
  const std::function<void(uint64_t)> progress_;
  UniqueFd fd_;
  uint64_t have_ = 0;
  std::optional<Sha256> sha_;  // of the bytes there are
  DirectWriter writer_;
  // Of the two that work on it.
  std::string data_;
  absl::Status written_;
  OneAhead writing_, hashing_;
};

}  // namespace

std::unique_ptr<ResultSource> NewResultSource(std::shared_ptr<grpc::Channel> channel, const std::string& server, const TlsFiles& tls,
                                              std::string job, Interrupt* interrupt) {
  return std::make_unique<RemoteResultSource>(std::move(channel), server, tls, std::move(job), interrupt);
}

absl::StatusOr<ListResultResponse> Download(ResultSource& source, const std::string& directory, const DownloadOptions& options) {
  QUERN_ASSIGN_OR_RETURN(ListResultResponse list, source.List());
  QUERN_RETURN_IF_ERROR(CheckNames(list));
  uint64_t total = 0, have = 0;
  std::vector<const ListResultResponse::File*> missing;
  std::vector<std::string> taken;
  for (const ListResultResponse::File& file : list.files()) {
    QUERN_ASSIGN_OR_RETURN(const std::optional<bool> there, IsThere(JoinPath(directory, file.name()), file));
    total += file.size();
    if (!there.has_value()) {
      missing.push_back(&file);
    } else if (*there) {
      have += file.size();
    } else {
      taken.push_back(file.name());
    }
  }
  if (!taken.empty()) {
    return absl::AlreadyExistsError(absl::StrCat(directory, " holds other files of the same names (", absl::StrJoin(taken, ", "),
                                                 "); nothing is replaced: choose another directory"));
  }
  for (const ListResultResponse::File* file : missing) {
    FileDownload download(&source, file, JoinPath(directory, file->name()), &options,
                          [&](uint64_t of_file) { options.progress(file->name(), have + of_file, total); });
    QUERN_RETURN_IF_ERROR(download.Run());
    have += file->size();
  }
  return list;
}

}  // namespace quern::client
