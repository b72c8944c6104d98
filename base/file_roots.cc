#include "base/file_roots.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <list>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace quern {
namespace {

const std::string kHere(1, '.');   // this way g++ 12 does not warn where it is assigned
constexpr int kMostLinks = 40;     // as in the kernel
constexpr int kRaceRetries = 128;  // openat2 gives up with EAGAIN when something was renamed meanwhile

std::atomic<const FileRoots*> confinement{nullptr};

bool Creates(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

int OpenRetrying(int directory, const std::string& name, int flags, mode_t mode) {
  int fd;
  do {
    fd = openat(directory, name.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

int OpenBeneath(int directory, const std::string& name, int flags, mode_t mode, FileRoots::Links links) {
  struct open_how how;
  memset(&how, 0, sizeof(how));
  how.flags = static_cast<unsigned>(flags | O_CLOEXEC);
  how.mode = Creates(flags) ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  if (links == FileRoots::Links::kRefuse) how.resolve |= RESOLVE_NO_SYMLINKS;
  long fd = -1;
  for (int i = 0; i < kRaceRetries; ++i) {
    fd = syscall(SYS_openat2, directory, name.c_str(), &how, sizeof(how));
    if (fd >= 0 || (errno != EINTR && errno != EAGAIN)) break;
  }
  return static_cast<int>(fd);
}

bool IsBelow(absl::string_view path, absl::string_view root, std::string* rest) {
  if (root == "/") {
    if (!absl::StartsWith(path, "/")) return false;
  } else if (!absl::ConsumePrefix(&path, root) || (!path.empty() && path[0] != '/')) {
    return false;
  }
  while (absl::ConsumePrefix(&path, "/")) {
  }
  *rest = std::string(path);
  return true;
}

// Of all LinklessTrees.
struct Tree {
  std::string path;
  std::shared_ptr<const FileRoots> roots;
};

class Trees {
 public:
  std::list<Tree>::const_iterator Add(Tree tree) {
    MutexLock lock(&mutex_);
    ++count_;
    return trees_.insert(trees_.end(), std::move(tree));
  }
  void Remove(std::list<Tree>::const_iterator tree) {
    MutexLock lock(&mutex_);
    --count_;
    trees_.erase(tree);
  }
  // Whether `path` is in a tree or on the way to one. `roots` are those that hold it, nullptr when none do yet.
  bool Find(const std::string& path, std::shared_ptr<const FileRoots>* roots) {
    if (count_ == 0) return false;
    std::string rest;
    MutexLock lock(&mutex_);
    for (const Tree& tree : trees_) {
      if (!IsBelow(path, tree.path, &rest) && !IsBelow(tree.path, path, &rest)) continue;
      if (!tree.roots->Holds(path)) continue;
      *roots = tree.roots;
      return true;
    }
    return false;
  }

 private:
  std::atomic<size_t> count_{0};
  Mutex mutex_;
  std::list<Tree> trees_ QUERN_GUARDED_BY(mutex_);
};

Trees& AllTrees() {
  static auto* const trees = new Trees;
  return *trees;
}

// How a path is to be looked up; `roots` is nullptr where nobody says.
struct Rule {
  const FileRoots* roots = nullptr;
  FileRoots::Links links = FileRoots::Links::kFollow;
  std::shared_ptr<const FileRoots> held;
};

Rule RuleOf(const std::string& path) {
  Rule rule;
  if (AllTrees().Find(path, &rule.held)) {
    rule.roots = rule.held.get();
    rule.links = FileRoots::Links::kRefuse;
  }
  const FileRoots* const confined = confinement.load(std::memory_order_acquire);
  if (confined != nullptr && confined->Holds(path)) rule.roots = confined;
  return rule;
}

// A directory and a name in it, for calls that take both.
struct Entry {
  UniqueFd held;
  int directory = AT_FDCWD;
  std::string name;
};

int EscapeToAccess(int result) {
  if (result < 0 && errno == EXDEV) errno = EACCES;
  return result;
}

// The last name of `path` is not followed. 0, or -1 and errno.
int EntryOf(const std::string& path, Entry* entry) {
  const Rule rule = RuleOf(path);
  if (rule.roots == nullptr) {
    entry->name = path;
    return 0;
  }
  entry->name = BaseName(path);
  std::string parent = DirName(path);
  if (entry->name == "..") {
    errno = EACCES;
    return -1;
  }
  if (!rule.roots->Holds(parent) || entry->name.empty()) {  // a root itself
    parent = path;
    entry->name = kHere;
  }
  entry->held = UniqueFd(EscapeToAccess(rule.roots->OpenFile(parent, O_PATH | O_DIRECTORY, 0, rule.links)));
  if (!entry->held) return -1;
  entry->directory = entry->held.get();
  return 0;
}

}  // namespace

// What a walk has come to: `name` in `directory`, which is "." for a directory.
struct FileRoots::Place {
  UniqueFd directory;
  std::string name;
  std::string real;          // of the directory
  std::deque<Part> missing;  // with ENOENT: names from the first one that does not exist
};

absl::StatusOr<std::shared_ptr<const FileRoots>> FileRoots::Open(const std::vector<std::string>& roots, Lookup lookup) {
  std::shared_ptr<FileRoots> opened(new FileRoots);
  opened->lookup_ = lookup;
  opened->names_ = roots;
  for (const std::string& given : roots) {
    char real[PATH_MAX];
    if (realpath(given.c_str(), real) == nullptr) return ErrnoToStatus(errno, "realpath", given);
    Root root;
    root.real = real;
    root.given = given;
    while (root.given.size() > 1 && root.given.back() == '/') root.given.pop_back();
    root.directory = UniqueFd(open(real, O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!root.directory) return ErrnoToStatus(errno, "open", given);
    opened->roots_.push_back(std::move(root));
  }
  return std::shared_ptr<const FileRoots>(std::move(opened));
}

int FileRoots::FindRoot(absl::string_view path, std::string* rest) const {
  int found = -1;
  std::string candidate;
  for (size_t i = 0; i < roots_.size(); ++i) {
    for (const std::string* name : {&roots_[i].real, &roots_[i].given}) {
      // The innermost root leaves the shortest rest.
      if (!absl::StartsWith(*name, "/") || !IsBelow(path, *name, &candidate) || (found >= 0 && candidate.size() >= rest->size())) continue;
      found = static_cast<int>(i);
      *rest = candidate;
    }
  }
  return found;
}

bool FileRoots::Holds(absl::string_view path) const {
  std::string rest;
  return FindRoot(path, &rest) >= 0;
}

// 0, or an error: ENOENT with `place` as far as it exists, EXDEV for what leads out.
int FileRoots::Walk(const std::string& path, bool follow_last, Links links, Place* place) const {
  std::deque<Part> parts;
  const auto prepend = [&parts](absl::string_view text, bool from_link) {
    std::vector<absl::string_view> names = absl::StrSplit(text, '/', absl::SkipEmpty());
    for (auto it = names.rbegin(); it != names.rend(); ++it) parts.push_front({std::string(*it), from_link});
  };
  std::string rest;
  int root = FindRoot(path, &rest);
  if (root < 0) return EXDEV;
  prepend(rest, /*from_link=*/false);
  std::vector<std::pair<UniqueFd, std::string>> below;  // the directories between the root and here
  const auto here = [&] { return below.empty() ? roots_[root].directory.get() : below.back().first.get(); };
  place->name = kHere;
  int error = 0, followed = 0;
  while (!parts.empty()) {
    const Part part = std::move(parts.front());
    parts.pop_front();
    if (part.name == ".") continue;
    if (part.name == "..") {
      if (!below.empty()) {
        below.pop_back();
      } else if (roots_[root].real != "/") {
        return EXDEV;
      }
      continue;
    }
    UniqueFd fd(OpenRetrying(here(), part.name, O_PATH | O_NOFOLLOW, 0));
    if (!fd) {
      if (errno != ENOENT) return errno;
      error = ENOENT;
      place->missing = std::move(parts);
      place->missing.push_front(part);
      break;
    }
    struct stat info;
    if (fstat(fd.get(), &info) != 0) return errno;
    if (S_ISLNK(info.st_mode) && (follow_last || !parts.empty())) {
      if (links == Links::kRefuse || ++followed > kMostLinks) return ELOOP;
      char target[PATH_MAX];
      const ssize_t size = readlinkat(fd.get(), "", target, sizeof(target));
      if (size < 0) return errno;
      if (size == sizeof(target)) return ENAMETOOLONG;
      absl::string_view text(target, size);
      if (absl::StartsWith(text, "/")) {
        const int other = FindRoot(text, &rest);
        if (other < 0) return EXDEV;
        root = other;
        below.clear();
        text = rest;
      }
      prepend(text, /*from_link=*/true);
      continue;
    }
    if (!S_ISDIR(info.st_mode)) {
      if (!parts.empty()) return ENOTDIR;
      place->name = part.name;
      break;
    }
    below.emplace_back(std::move(fd), part.name);
  }
  place->real = roots_[root].real;
  for (const auto& [fd, name] : below) place->real = JoinPath(place->real, name);
  if (below.empty()) {
    place->directory = UniqueFd(fcntl(here(), F_DUPFD_CLOEXEC, 0));
    if (!place->directory) return errno;
  } else {
    place->directory = std::move(below.back().first);
  }
  return error;
}

int FileRoots::OpenFile(const std::string& path, int flags, mode_t mode, Links links) const {
  if (path.find('\0') != std::string::npos) {
    errno = EINVAL;
    return -1;
  }
  if (lookup_ == Lookup::kKernel) {
    std::string rest;
    const int root = FindRoot(path, &rest);
    if (root < 0) {
      errno = EXDEV;
      return -1;
    }
    const int fd = OpenBeneath(roots_[root].directory.get(), rest.empty() ? "." : rest, flags, mode, links);
    // Kernels and sandboxes that lack the call say ENOSYS or EPERM. EXDEV is also said of absolute links, which may lead to a root.
    if (fd >= 0 || (errno != ENOSYS && errno != EPERM && errno != EXDEV && errno != EAGAIN)) return fd;
  }
  const bool follow_last = (flags & O_NOFOLLOW) == 0 && (flags & (O_CREAT | O_EXCL)) != (O_CREAT | O_EXCL);
  Place place;
  const int error = Walk(path, follow_last, links, &place);
  if (error == ENOENT && Creates(flags) && place.missing.size() == 1) {
    place.name = place.missing.front().name;
  } else if (error != 0) {
    errno = error;
    return -1;
  }
  return OpenRetrying(place.directory.get(), place.name, place.name == "." ? flags : flags | O_NOFOLLOW, mode);
}

FileRoots::Resolved FileRoots::Resolve(const std::string& path) const {
  Resolved resolved;
  Place place;
  resolved.error = path.find('\0') != std::string::npos ? EINVAL : Walk(path, /*follow_last=*/true, Links::kFollow, &place);
  resolved.path = place.real;
  if (resolved.error == 0 && place.name != ".") resolved.path = JoinPath(resolved.path, place.name);
  if (resolved.error != ENOENT) return resolved;
  resolved.error = 0;
  for (const Part& part : place.missing) {
    resolved.broken_link = resolved.broken_link || part.from_link;
    resolved.up_behind_missing = resolved.up_behind_missing || part.name == "..";
    if (part.name != ".") resolved.path = JoinPath(resolved.path, part.name);
  }
  return resolved;
}

FileConfinement::FileConfinement(std::shared_ptr<const FileRoots> roots) : roots_(std::move(roots)) {
  confinement.store(roots_.get(), std::memory_order_release);
}

FileConfinement::~FileConfinement() { confinement.store(nullptr, std::memory_order_release); }

absl::StatusOr<LinklessTree> LinklessTree::Open(const std::string& root, const std::string& tree) {
  Tree entry;
  entry.path = tree;
  while (entry.path.size() > 1 && entry.path.back() == '/') entry.path.pop_back();
  QUERN_ASSIGN_OR_RETURN(entry.roots, FileRoots::Open({root}));
  if (!entry.roots->Holds(tree)) return absl::InvalidArgumentError(absl::StrCat(tree, " is no absolute path below ", root));
  const auto place = AllTrees().Add(std::move(entry));
  return LinklessTree(std::shared_ptr<const void>(&*place, [place](const void*) { AllTrees().Remove(place); }));
}

bool RefusesLinks(const std::string& path) { return RuleOf(path).links == FileRoots::Links::kRefuse; }

int ConfinedOpen(const std::string& path, int flags, mode_t mode) {
  const Rule rule = RuleOf(path);
  if (rule.roots == nullptr) return OpenRetrying(AT_FDCWD, path, flags, mode);
  return EscapeToAccess(rule.roots->OpenFile(path, flags, mode, rule.links));
}

int ConfinedStat(const std::string& path, struct stat* info) {
  if (RuleOf(path).roots == nullptr) return stat(path.c_str(), info);
  const UniqueFd fd(ConfinedOpen(path, O_PATH));
  return fd ? fstat(fd.get(), info) : -1;
}

int ConfinedLstat(const std::string& path, struct stat* info) {
  Entry entry;
  if (EntryOf(path, &entry) != 0) return -1;
  return fstatat(entry.directory, entry.name.c_str(), info, AT_SYMLINK_NOFOLLOW);
}

ssize_t ConfinedReadlink(const std::string& path, char* target, size_t size) {
  Entry entry;
  if (EntryOf(path, &entry) != 0) return -1;
  return readlinkat(entry.directory, entry.name.c_str(), target, size);
}

int ConfinedRename(const std::string& from, const std::string& to) {
  Entry source, target;
  if (EntryOf(from, &source) != 0 || EntryOf(to, &target) != 0) return -1;
  return renameat(source.directory, source.name.c_str(), target.directory, target.name.c_str());
}

int ConfinedUnlink(const std::string& path) {
  Entry entry;
  if (EntryOf(path, &entry) != 0) return -1;
  return unlinkat(entry.directory, entry.name.c_str(), 0);
}

int ConfinedMkdir(const std::string& path, mode_t mode) {
  Entry entry;
  if (EntryOf(path, &entry) != 0) return -1;
  return mkdirat(entry.directory, entry.name.c_str(), mode);
}

int ConfinedRmdir(const std::string& path) {
  Entry entry;
  if (EntryOf(path, &entry) != 0) return -1;
  return unlinkat(entry.directory, entry.name.c_str(), AT_REMOVEDIR);
}

}  // namespace quern
