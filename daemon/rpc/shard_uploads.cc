#include "daemon/rpc/shard_uploads.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern::daemon {

absl::Status ShardUpload::CheckTurn(uint64_t turn) const {
  if (turn == turn_ && !gone_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("another stream sends ", path_));
}

absl::Status ShardUpload::OpenFileOnce(uint64_t size, uint64_t durable) {
  QUERN_ASSIGN_OR_RETURN(directory_, HeldDirectory::Open(DirName(path_)));
  const std::string name = BaseName(path_);
  absl::StatusOr<UniqueFd> made = directory_->OpenFile(name, O_WRONLY | O_CREAT | O_EXCL);
  if (absl::IsAlreadyExists(made.status())) made = directory_->OpenFile(name, O_WRONLY);
  QUERN_RETURN_IF_ERROR(made.status());
  struct stat info;
  if (fstat(made->get(), &info) != 0) return ErrnoToStatus(errno, "stat", path_);
  if (static_cast<uint64_t>(info.st_size) < durable) {
    return absl::DataLossError(absl::StrCat(path_, " has ", info.st_size, " bytes, and had ", durable));
  }
  // What came later may have been written, and its end be lost, in a crash.
  if (ftruncate(made->get(), static_cast<off_t>(durable)) != 0) return ErrnoToStatus(errno, "truncate", path_);
  int result;
  do {
    result = size == 0 ? 0 : fallocate(made->get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    const absl::Status full = ErrnoToStatus(errno, "allocate", path_);
    if (durable == 0) directory_->RemoveFile(name).IgnoreError();  // the first error is the one to tell
    return full;
  }
  fd_ = *std::move(made);
  made_ = true;
  size_ = size;
  written_ = durable;
  return absl::OkStatus();
}

absl::Status ShardUpload::Broken(absl::Status status) {
  fd_.Reset();
  ++turn_;
  return status;
}

absl::StatusOr<uint64_t> ShardUpload::Open(uint64_t size, uint64_t durable, uint64_t* have) {
  MutexLock lock(&mutex_);
  if (gone_) return absl::AbortedError(absl::StrCat("the upload of ", path_, " has just ended"));
  if (!fd_) {
    QUERN_RETURN_IF_ERROR(OpenFileOnce(size, durable));
  } else if (durable > written_) {
    return absl::DataLossError(absl::StrCat(path_, " has ", written_, " bytes, and had ", durable));
  }
  if (size != size_) return absl::InvalidArgumentError(absl::StrCat(path_, " was to have ", size_, " bytes, not ", size));
  if (fdatasync(fd_.get()) != 0) return Broken(ErrnoToStatus(errno, "fdatasync", path_));
  *have = written_;
  return ++turn_;
}

absl::Status ShardUpload::Write(uint64_t turn, uint64_t offset, absl::string_view data) {
  MutexLock lock(&mutex_);
  QUERN_RETURN_IF_ERROR(CheckTurn(turn));
  if (offset != written_)
    return absl::AbortedError(absl::StrCat("bytes at ", offset, " of ", path_, " came in place of those at ", written_));
  if (data.size() > size_ - written_)
    return absl::InvalidArgumentError(absl::StrCat(path_, " is longer than the ", size_, " bytes announced"));
  if (absl::Status status = writer_.Write(fd_.get(), offset, data.data(), data.size(), path_); !status.ok())
    return Broken(std::move(status));
  written_ += data.size();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ShardUpload::Sync(uint64_t turn) {
  MutexLock lock(&mutex_);
  QUERN_RETURN_IF_ERROR(CheckTurn(turn));
  if (fdatasync(fd_.get()) != 0) return Broken(ErrnoToStatus(errno, "fdatasync", path_));
  return written_;
}

absl::Status ShardUpload::Finish(uint64_t turn) {
  MutexLock lock(&mutex_);
  QUERN_RETURN_IF_ERROR(CheckTurn(turn));
  if (written_ != size_) return absl::FailedPreconditionError(absl::StrCat(path_, " has ", written_, " of ", size_, " bytes"));
  if (fsync(fd_.get()) != 0) return Broken(ErrnoToStatus(errno, "fsync", path_));
  if (absl::Status status = directory_->Sync(); !status.ok()) return Broken(std::move(status));
  gone_ = true;
  return fd_.Close(path_);
}

uint64_t ShardUpload::written() {
  MutexLock lock(&mutex_);
  return written_;
}

void ShardUpload::Abandon() {
  MutexLock lock(&mutex_);
  if (gone_) return;
  gone_ = true;
  if (!made_) return;
  fd_.Reset();
  // One that cannot be removed is left to the publishing, which removes the directory.
  directory_->RemoveFile(BaseName(path_)).IgnoreError();
}

std::shared_ptr<ShardUpload> ShardUploads::Find(const UploadKey& key, const std::string& path) {
  MutexLock lock(&mutex_);
  std::shared_ptr<ShardUpload>& upload = uploads_[key];
  if (upload == nullptr) upload = std::make_shared<ShardUpload>(path);
  return upload;
}

void ShardUploads::Forget(const UploadKey& key) {
  MutexLock lock(&mutex_);
  uploads_.erase(key);
}

void ShardUploads::Sweep(const std::function<bool(const UploadKey&)>& lives) {
  std::vector<std::shared_ptr<ShardUpload>> over;
  {
    MutexLock lock(&mutex_);
    for (auto it = uploads_.begin(); it != uploads_.end();) {
      if (lives(it->first)) {
        ++it;
        continue;
      }
      over.push_back(std::move(it->second));
      it = uploads_.erase(it);
    }
  }
  for (const std::shared_ptr<ShardUpload>& upload : over) upload->Abandon();
}

}  // namespace quern::daemon
