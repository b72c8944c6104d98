// Confines files to directories: what a program opens on the word of others must lie below one of its roots, also when names and links are
// changed while it works.
#ifndef QUERN_BASE_FILE_ROOTS_H_
#define QUERN_BASE_FILE_ROOTS_H_

#include <sys/stat.h>
#include <sys/types.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file.h"

namespace quern {

// Directories that were opened once: a root that is renamed later stays the same directory. Immutable, thread-safe.
class FileRoots {
 public:
  enum class Lookup {
    kKernel,  // openat2(2) with RESOLVE_BENEATH, else kSteps
    kSteps,   // one name after the other, never following a link in the kernel
  };

  // `roots` must be directories.
  static absl::StatusOr<std::shared_ptr<const FileRoots>> Open(const std::vector<std::string>& roots, Lookup lookup = Lookup::kKernel);

  // The roots as they were given.
  const std::vector<std::string>& names() const { return names_; }
  // Whether `path` is spelled as a root or as something below one. Looks at no file.
  bool Holds(absl::string_view path) const;

  enum class Links {
    kFollow,  // those that stay below the roots
    kRefuse,  // none below a root: ELOOP
  };

  // open(2), with O_CLOEXEC: a descriptor, or -1 and errno, which is EXDEV for what is spelled outside of the roots or leads out of them by
  // ".." or a link.
  int OpenFile(const std::string& path, int flags, mode_t mode, Links links = Links::kFollow) const;

  // Where a path leads, with its links followed as far as it exists.
  struct Resolved {
    int error = 0;                   // errno, as above
    std::string path;                // absolute, without links, "." or "..": below the real path of a root
    bool broken_link = false;        // it goes on behind a link to something that does not exist
    bool up_behind_missing = false;  // it has ".." behind something that does not exist
  };
  Resolved Resolve(const std::string& path) const;

 private:
  struct Root {
    UniqueFd directory;
    std::string given;
    std::string real;
  };
  struct Part {
    std::string name;
    bool from_link = false;
  };
  struct Place;

  FileRoots() = default;
  // The root that `path` is spelled below, and the rest; -1 when there is none.
  int FindRoot(absl::string_view path, std::string* rest) const;
  int Walk(const std::string& path, bool follow_last, Links links, Place* place) const;

  Lookup lookup_ = Lookup::kKernel;
  std::vector<Root> roots_;
  std::vector<std::string> names_;
};

// While it lives, all of base/file.h and the functions below take paths that are spelled below `roots` to what lies there and nowhere else:
// what leads out is EACCES. Other paths, the program's own, are as ever. One at a time in a process.
class FileConfinement {
 public:
  explicit FileConfinement(std::shared_ptr<const FileRoots> roots);
  ~FileConfinement();
  FileConfinement(const FileConfinement&) = delete;
  FileConfinement& operator=(const FileConfinement&) = delete;

 private:
  const std::shared_ptr<const FileRoots> roots_;
};

// While it lives, all of base/file.h and the functions below follow no link on the way to `tree`, or in it, whoever has put it there and
// when: PERMISSION_DENIED, or ELOOP. For directories that are written to while strangers may change the names above them. `root`, above
// `tree`, is followed itself, and what is above it not looked at: a place that the administrator has chosen. Under a FileConfinement that
// holds `tree` its roots take the place of this one. There may be many at a time; thread-safe.
class LinklessTree {
 public:
  // Both absolute; `tree` is spelled below `root`, which must exist.
  static absl::StatusOr<LinklessTree> Open(const std::string& root, const std::string& tree);

 private:
  explicit LinklessTree(std::shared_ptr<const void> entry) : entry_(std::move(entry)) {}
  std::shared_ptr<const void> entry_;  // in the list of all, until it goes
};

// Whether a LinklessTree says that no link is followed on the way to `path`.
bool RefusesLinks(const std::string& path);

// System calls under the confinement, if there is one. They return -1 and set errno as the calls of their names do.
int ConfinedOpen(const std::string& path, int flags, mode_t mode = 0);
int ConfinedStat(const std::string& path, struct stat* info);
int ConfinedLstat(const std::string& path, struct stat* info);
ssize_t ConfinedReadlink(const std::string& path, char* target, size_t size);
int ConfinedRename(const std::string& from, const std::string& to);
int ConfinedUnlink(const std::string& path);
int ConfinedMkdir(const std::string& path, mode_t mode);
int ConfinedRmdir(const std::string& path);

}  // namespace quern

#endif  // QUERN_BASE_FILE_ROOTS_H_
