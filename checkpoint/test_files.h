// Small checkpoint files for tests.
#ifndef QUERN_CHECKPOINT_TEST_FILES_H_
#define QUERN_CHECKPOINT_TEST_FILES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"
#include "base/file.h"
#include "checkpoint/safetensors.h"

namespace quern::checkpoint {

// Length bytes, `json` as it is, then `data`: for headers that no writer would write.
inline std::string RawSafetensors(absl::string_view json, absl::string_view data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(uint64_t{json.size()} >> (8 * i)));
  return absl::StrCat(bytes, json, data);
}

// Ranges of `tensors` set one behind the other, in their order.
inline std::vector<TensorInfo> Consecutive(std::vector<TensorInfo> tensors) {
  uint64_t offset = 0;
  for (TensorInfo& tensor : tensors) {
    tensor.begin = offset;
    offset += tensor.elements() * BitsPerElement(tensor.dtype) / 8;
    tensor.end = offset;
  }
  return tensors;
}

// A valid file of tensors whose data bytes are all `fill`.
inline std::string MakeSafetensors(const std::vector<TensorInfo>& tensors, char fill = 'x') {
  const std::vector<TensorInfo> placed = Consecutive(tensors);
  return absl::StrCat(BuildSafetensorsHeader(placed), std::string(placed.empty() ? 0 : placed.back().end, fill));
}

// A new temporary file system tree: Write makes the directories on the way.
class TestDirectory {
 public:
  TestDirectory() : directory_(*TempDir::Make("checkpoint_test")) {}
  const std::string& path() const { return directory_.path(); }
  std::string Path(absl::string_view name) const { return JoinPath(directory_.path(), name); }
  absl::Status Write(absl::string_view name, absl::string_view content) const {
    const std::string path = Path(name);
    if (absl::Status status = MakeDirectories(DirName(path)); !status.ok()) return status;
    return WriteFileDurably(path, content);
  }

 private:
  TempDir directory_;
};

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_TEST_FILES_H_
