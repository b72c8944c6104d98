#include "quant/golden_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "base/file.h"

namespace quern::quant {

GoldenFile::GoldenFile(const std::string& name) : name_("tests/golden/" + name) {
  const absl::StatusOr<std::string> file = ReadFileToString(name_);
  if (!file.ok()) return;
  uint64_t size;
  std::memcpy(&size, file->data(), sizeof size);
  const nlohmann::json header = nlohmann::json::parse(file->substr(8, size));
  for (const auto& [tensor, entry] : header.items()) {
    if (tensor == "__metadata__") continue;
    const uint64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensors_[tensor] = {ParseDType(std::string(entry["dtype"])).value(), entry["shape"], file->substr(8 + size + begin, end - begin)};
  }
}

const GoldenTensor& GoldenFile::Get(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  ADD_FAILURE() << "no tensor " << name << " in " << name_;
  static const GoldenTensor empty;
  return empty;
}

TestWeight GoldenFile::Weight(const std::string& name) const {
  const GoldenTensor& tensor = Get(name);
  TestWeight weight;
  weight.dtype = tensor.dtype;
  weight.shape = {static_cast<int64_t>(tensor.shape.at(0)), static_cast<int64_t>(tensor.shape.at(1))};
  weight.bytes = tensor.bytes;
  return weight;
}

}  // namespace quern::quant
