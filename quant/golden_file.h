// Support of the quant tests: tensors of the files in tests/golden, whose scripts say what is in them.
#ifndef QUERN_QUANT_GOLDEN_FILE_H_
#define QUERN_QUANT_GOLDEN_FILE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "quant/test_weight.h"

namespace quern::quant {

struct GoldenTensor {
  DType dtype = DType::kU8;
  std::vector<uint64_t> shape;
  std::string bytes;
};

class GoldenFile {
 public:
  // `name` is that of a file in tests/golden. One that cannot be read has no tensors.
  explicit GoldenFile(const std::string& name);

  const std::map<std::string, GoldenTensor>& tensors() const { return tensors_; }
  // A tensor that is not there fails the test.
  const GoldenTensor& Get(const std::string& name) const;
  // A two-dimensional tensor as a weight.
  TestWeight Weight(const std::string& name) const;

 private:
  const std::string name_;
  std::map<std::string, GoldenTensor> tensors_;
};

}  // namespace quern::quant

#endif  // QUERN_QUANT_GOLDEN_FILE_H_
