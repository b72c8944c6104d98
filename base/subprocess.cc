#include "base/subprocess.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

extern char** environ;

namespace quern {
namespace {

// Descriptor numbers that dup2 targets in the child must not collide with sources: everything is first moved above this.
constexpr int kHighFd = 200;

ExitState FromWaitStatus(int status) {
  if (WIFSIGNALED(status)) return {true, WTERMSIG(status)};
  return {false, WEXITSTATUS(status)};
}

struct FileActions {
  posix_spawn_file_actions_t actions;
  FileActions() { posix_spawn_file_actions_init(&actions); }
  ~FileActions() { posix_spawn_file_actions_destroy(&actions); }
};

struct SpawnAttributes {
  posix_spawnattr_t attributes;
  SpawnAttributes() { posix_spawnattr_init(&attributes); }
  ~SpawnAttributes() { posix_spawnattr_destroy(&attributes); }
};

}  // namespace

std::string ExitState::ToString() const {
  return signaled ? absl::StrCat("signal ", code, " (", strsignal(code), ")") : absl::StrCat("exit status ", code);
}

absl::StatusOr<Subprocess> Subprocess::Spawn(const Options& options) {
  Subprocess child;
  FileActions files;
  SpawnAttributes attributes;
  std::vector<std::string> arguments = options.argv;
  std::vector<UniqueFd> moved;

  std::vector<std::pair<int, int>> inherited = options.inherited_fds;
  UniqueFd read_end;
  if (options.tie_to_parent) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoToStatus(errno, "pipe2", arguments[0]);
    read_end = UniqueFd(ends[0]);
    child.parent_pipe_ = UniqueFd(ends[1]);
    int number = 3;
    for (const auto& [ours, theirs] : inherited) number = std::max(number, theirs + 1);
    inherited.emplace_back(read_end.get(), number);
    arguments.push_back(absl::StrCat("--parent-fd=", number));
  }
  for (const auto& [ours, theirs] : inherited) {
    const int high = fcntl(ours, F_DUPFD_CLOEXEC, kHighFd);
    if (high < 0) return ErrnoToStatus(errno, "dup", arguments[0]);
    moved.emplace_back(high);
    posix_spawn_file_actions_adddup2(&files.actions, high, theirs);
  }
  if (!options.log_path.empty()) {
    posix_spawn_file_actions_addopen(&files.actions, 1, options.log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    posix_spawn_file_actions_adddup2(&files.actions, 1, 2);
  }
  posix_spawn_file_actions_addopen(&files.actions, 0, "/dev/null", O_RDONLY, 0);

  short flags = POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF;
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes.attributes, &none);
  posix_spawnattr_setsigdefault(&attributes.attributes, &all);
  if (options.new_process_group) {
    flags |= POSIX_SPAWN_SETPGROUP;
    posix_spawnattr_setpgroup(&attributes.attributes, 0);
  }
  posix_spawnattr_setflags(&attributes.attributes, flags);

  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const int error = posix_spawn(&child.pid_, argv[0], &files.actions, &attributes.attributes, argv.data(), environ);
  if (error != 0) {
    child.pid_ = -1;
    return ErrnoToStatus(error, "spawn", arguments[0]);
  }
  return child;
}

Subprocess::Subprocess(Subprocess&& other) noexcept : pid_(std::exchange(other.pid_, -1)), parent_pipe_(std::move(other.parent_pipe_)) {}

Subprocess& Subprocess::operator=(Subprocess&& other) noexcept {
  if (this != &other) {
    this->~Subprocess();
    new (this) Subprocess(std::move(other));
  }
  return *this;
}

Subprocess::~Subprocess() {
  if (!running()) return;
  kill(pid_, SIGKILL);
  Wait().status().IgnoreError();  // nothing to do about a child that cannot be reaped
}

absl::Status Subprocess::Kill(int signal) {
  if (running() && kill(pid_, signal) != 0) return ErrnoToStatus(errno, "kill", absl::StrCat("process ", pid_));
  return absl::OkStatus();
}

absl::StatusOr<ExitState> Subprocess::Wait() {
  int status;
  pid_t reaped;
  do {
    reaped = waitpid(pid_, &status, 0);
  } while (reaped < 0 && errno == EINTR);
  if (reaped < 0) return ErrnoToStatus(errno, "waitpid", absl::StrCat("process ", pid_));
  pid_ = -1;
  return FromWaitStatus(status);
}

absl::StatusOr<bool> Subprocess::Poll(ExitState* state) {
  int status;
  const pid_t reaped = waitpid(pid_, &status, WNOHANG);
  if (reaped < 0 && errno != EINTR) return ErrnoToStatus(errno, "waitpid", absl::StrCat("process ", pid_));
  if (reaped <= 0) return false;
  pid_ = -1;
  *state = FromWaitStatus(status);
  return true;
}

void WatchParent(int fd, void (*on_gone)()) {
  if (fd < 0) return;
  std::thread([fd, on_gone] {
    char byte;
    ssize_t n;
    do {
      n = read(fd, &byte, 1);
    } while (n > 0 || (n < 0 && errno == EINTR));
    on_gone();
  }).detach();
}

std::string ProgramDirectory() {
  std::string path(4096, '\0');
  const ssize_t n = readlink("/proc/self/exe", path.data(), path.size());
  path.resize(n > 0 ? n : 0);
  return DirName(path);
}

}  // namespace quern
