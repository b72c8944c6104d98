// Tasks that read a finished file from start to end: its SHA-256, and what its tensors must look like.
#include <errno.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/dtype.h"
#include "base/status_macros.h"
#include "worker/pipeline/task_context.h"

namespace quern::worker {
namespace {

// Looks at the bytes of one tensor as they pass, in order, and remembers the first that is wrong.
class ValueChecker {
 public:
  explicit ValueChecker(const quern::v1::ValueCheck& check) : check_(check) {}
  virtual ~ValueChecker() = default;
  // Bytes [offset, offset + size) of the tensor.
  virtual void Feed(uint64_t offset, const unsigned char* data, uint64_t size) = 0;

  const quern::v1::OutputTensor& tensor() const { return check_.tensor(); }
  const std::optional<quern::v1::Mismatch>& mismatch() const { return mismatch_; }

 protected:
  const quern::v1::ValueCheck& check() const { return check_; }
  void Report(uint64_t offset_in_tensor, const std::string& what) {
    if (mismatch_.has_value()) return;
    mismatch_.emplace();
    mismatch_->set_tensor(tensor().name());
    mismatch_->set_offset(tensor().offset() + offset_in_tensor);
    mismatch_->set_what(what);
  }

 private:
  const quern::v1::ValueCheck& check_;
  std::optional<quern::v1::Mismatch> mismatch_;
};

// Every element finite, and, for scales, above zero.
class FiniteChecker : public ValueChecker {
 public:
  static bool Knows(DType dtype, bool scales) {
    switch (dtype) {
      case DType::kBF16:
      case DType::kF16:
      case DType::kF32:
      case DType::kF8E4M3:
        return true;
      default:
        return scales && IsExponent(dtype);
    }
  }

  FiniteChecker(const quern::v1::ValueCheck& check, DType dtype, bool scales)
      : ValueChecker(check), size_(static_cast<uint64_t>(BytesPerElement(dtype))), scales_(scales) {
    // Elements as unsigned integers: what is finite and not negative lies below `bound_`.
    switch (dtype) {
      case DType::kBF16:
        bound_ = 0x7F80;
        break;
      case DType::kF16:
        bound_ = 0x7C00;
        break;
      case DType::kF8E4M3:
        bound_ = 0x7F;
        break;
      case DType::kF32:
        bound_ = 0x7F800000;
        break;
      default:  // powers of two: 0 is the least of them, 255 is NaN
        bound_ = 0xFF;
        least_ = 0;
        break;
    }
    // Without the sign, where values may be negative.
    if (!scales) {
      mask_ = size_ == 1 ? 0x7F : size_ == 2 ? 0x7FFF : 0x7FFFFFFF;
      least_ = 0;
    }
  }

  void Feed(uint64_t offset, const unsigned char* data, uint64_t size) override {
    uint64_t i = 0;
    while (i < size && (offset + i) % size_ != 0) Split(offset + i, data[i]), ++i;
    const uint64_t whole = (size - i) / size_;
    switch (size_) {
      case 1:
        Scan<uint8_t>(offset + i, data + i, whole);
        break;
      case 2:
        Scan<uint16_t>(offset + i, data + i, whole);
        break;
      default:
        Scan<uint32_t>(offset + i, data + i, whole);
        break;
    }
    for (i += whole * size_; i < size; ++i) Split(offset + i, data[i]);
  }

 private:
  static bool IsExponent(DType dtype) { return dtype == DType::kU8 || dtype == DType::kF8E8M0; }
  bool Wrong(uint32_t bits) const { return (bits & mask_) < least_ || (bits & mask_) >= bound_; }

  template <class T>
  void Scan(uint64_t offset, const unsigned char* data, uint64_t count) {
    constexpr uint64_t kBlock = 4096;
    for (uint64_t begin = 0; begin < count; begin += kBlock) {
      const uint64_t end = std::min(begin + kBlock, count);
      // No way out of the loop, so that it becomes one of vectors.
      const T mask = static_cast<T>(mask_), least = static_cast<T>(least_), room = static_cast<T>(bound_ - least_);
      T wrong = 0;
      for (uint64_t i = begin; i < end; ++i) {
        T bits;
        memcpy(&bits, data + i * sizeof(T), sizeof bits);
        wrong |= static_cast<T>(static_cast<T>((bits & mask) - least) >= room);
      }
      for (uint64_t i = begin; wrong != 0 && i < end; ++i) {
        T bits;
        memcpy(&bits, data + i * sizeof(T), sizeof bits);
        Check(offset + i * sizeof(T), bits);
      }
    }
  }

  // An element that is cut by the end of a tile, byte by byte.
  void Split(uint64_t offset, unsigned char byte) {
    const uint64_t have = offset % size_;
    split_ = (have == 0 ? 0 : split_) | uint32_t{byte} << (8 * have);
    if (have + 1 == size_) Check(offset + 1 - size_, split_);
  }

  void Check(uint64_t offset, uint32_t bits) {
    if (!Wrong(bits)) return;
    Report(offset,
           absl::StrCat("element ", offset / size_, " (bits 0x", absl::Hex(bits), ") is no finite number", scales_ ? " above zero" : ""));
  }

  const uint64_t size_;
  const bool scales_;
  uint32_t bound_;
  uint32_t least_ = 1;
  uint32_t mask_ = ~uint32_t{0};
  uint32_t split_ = 0;
};

// Packed rows: bits behind the last element are 0. Words are 32 bits, little-endian.
class TailChecker : public ValueChecker {
 public:
  explicit TailChecker(const quern::v1::ValueCheck& check) : ValueChecker(check) {
    const uint64_t columns = check.tensor().shape(1) * 4;
    const uint64_t used = check.elements() * check.num_bits() % 32;
    if (used == 0) return;
    mask_ = ~uint32_t{0} << used;
    if (check.packed_dim() == 1) {
      begin_ = columns - 4;
      stride_ = columns;
      run_ = 4;
    } else {
      begin_ = (check.tensor().shape(0) - 1) * columns;
      stride_ = run_ = columns;
    }
  }

  static bool Valid(const quern::v1::ValueCheck& check) {
    const quern::v1::OutputTensor& tensor = check.tensor();
    if (tensor.shape_size() != 2 || check.packed_dim() > 1 || check.num_bits() < 1 || check.num_bits() > 32) return false;
    const __int128 words = (__int128{check.elements()} * check.num_bits() + 31) / 32;
    return words > 0 && words == tensor.shape(static_cast<int>(check.packed_dim())) &&
           __int128{tensor.shape(0)} * tensor.shape(1) * 4 == tensor.size();
  }

  void Feed(uint64_t offset, const unsigned char* data, uint64_t size) override {
    if (mask_ == 0) return;
    const uint64_t end = offset + size;
    uint64_t run = begin_;
    if (offset > begin_) run += (offset - begin_) / stride_ * stride_;
    for (; run < end; run += stride_) {
      for (uint64_t at = std::max(run, offset); at < std::min(run + run_, end); ++at) {
        if ((data[at - offset] & (mask_ >> (8 * (at % 4)) & 0xFF)) != 0) {
          Report(at, absl::StrCat("bits behind element ", check().elements() - 1, " are not 0"));
          return;
        }
      }
    }
  }

 private:
  uint32_t mask_ = 0;
  // Runs of words that have a tail: every `stride_` bytes from `begin_` on.
  uint64_t begin_ = 0;
  uint64_t stride_ = 1;
  uint64_t run_ = 0;
};

class EqualsChecker : public ValueChecker {
 public:
  using ValueChecker::ValueChecker;
  void Feed(uint64_t offset, const unsigned char* data, uint64_t size) override {
    if (memcmp(data, check().expected().data() + offset, size) != 0) Report(0, "the bytes are not those expected");
  }
};

absl::StatusOr<std::unique_ptr<ValueChecker>> NewChecker(const quern::v1::ValueCheck& check, uint64_t file_size) {
  const quern::v1::OutputTensor& tensor = check.tensor();
  if (tensor.offset() > file_size || tensor.size() > file_size - tensor.offset()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name(), " leads out of the file"));
  }
  switch (check.kind()) {
    case quern::v1::ValueCheck::FINITE_NONZERO:
    case quern::v1::ValueCheck::FINITE: {
      const bool scales = check.kind() == quern::v1::ValueCheck::FINITE_NONZERO;
      QUERN_ASSIGN_OR_RETURN(const DType dtype, ParseDType(tensor.dtype()));
      if (!FiniteChecker::Knows(dtype, scales)) break;
      return std::make_unique<FiniteChecker>(check, dtype, scales);
    }
    case quern::v1::ValueCheck::ZERO_TAIL_BITS:
      if (!TailChecker::Valid(check)) break;
      return std::make_unique<TailChecker>(check);
    case quern::v1::ValueCheck::EQUALS:
      if (check.expected().size() != tensor.size()) break;
      return std::make_unique<EqualsChecker>(check);
    default:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name(), ": its check does not fit its dtype and shape"));
}

// Of the strand of one file.
struct Pass {
  Sha256 sha;
  std::vector<std::unique_ptr<ValueChecker>> checkers;  // by offset
  size_t next = 0;                                      // the first that has bytes to come

  void Feed(uint64_t offset, const std::byte* data, uint64_t size) {
    sha.Update(data, size);
    for (size_t i = next; i < checkers.size(); ++i) {
      const quern::v1::OutputTensor& tensor = checkers[i]->tensor();
      const uint64_t begin = std::max(tensor.offset(), offset);
      const uint64_t end = std::min(tensor.offset() + tensor.size(), offset + size);
      if (tensor.offset() >= offset + size) break;
      if (begin < end) {
        checkers[i]->Feed(begin - tensor.offset(), reinterpret_cast<const unsigned char*>(data + (begin - offset)), end - begin);
      }
      if (i == next && tensor.offset() + tensor.size() <= offset + size) ++next;
    }
  }
};

}  // namespace

absl::Status RunVerifyFile(TaskContext& context, const quern::v1::VerifyFile& work, quern::v1::TaskResult* result) {
  const auto mismatch = [&](const std::string& what) {
    quern::v1::Mismatch* found = result->add_mismatches();
    found->set_file(work.path());
    found->set_what(what);
    return absl::OkStatus();
  };
  absl::StatusOr<SourceHandle> file = context.Open(work.path());
  if (absl::IsNotFound(file.status())) return mismatch("the file is missing");
  QUERN_RETURN_IF_ERROR(file.status());
  result->set_file_size(file->size);
  if (file->size != work.size()) return mismatch(absl::StrCat("the file has ", file->size, " bytes instead of ", work.size()));

  const auto pass = std::make_shared<Pass>();
  for (const quern::v1::ValueCheck& check : work.checks()) {
    absl::StatusOr<std::unique_ptr<ValueChecker>> checker = NewChecker(check, file->size);
    if (!checker.ok()) return Annotate(checker.status(), work.path());
    pass->checkers.push_back(*std::move(checker));
  }
  std::stable_sort(pass->checkers.begin(), pass->checkers.end(),
                   [](const auto& a, const auto& b) { return a->tensor().offset() < b->tensor().offset(); });

  absl::Status status;
  const auto strand = std::make_shared<Strand>();
  for (uint64_t offset = 0; status.ok() && offset < file->size; offset += context.preferred_tile()) {
    const uint64_t size = std::min(context.preferred_tile(), file->size - offset);
    auto step = std::make_unique<Step>();
    step->what = "file";
    absl::StatusOr<PoolBuffer> buffer = context.engine().AcquireInput(BufferFor(offset, size));
    if (!buffer.ok()) {
      status = buffer.status();
      break;
    }
    step->buffer = *std::move(buffer);
    step->reads.push_back({&*file, offset, size, step->buffer.data(), nullptr});
    step->strand = strand;
    step->compute = [pass, offset, size, data = step->buffer.data()](Step::Done done) {
      pass->Feed(offset, data, size);
      done(absl::OkStatus());
    };
    status = context.engine().Start(std::move(step));
  }
  if (status.ok()) status = context.engine().Drain();
  // Reads under way refer to the file.
  context.engine().Stop();
  QUERN_RETURN_IF_ERROR(status);

  const std::string sha256 = pass->sha.Finish();
  result->set_sha256(sha256);
  if (sha256 != work.sha256()) {
    mismatch(absl::StrCat("its SHA-256 is ", HexDigest(sha256), " instead of ", HexDigest(work.sha256()))).IgnoreError();
  }
  for (const std::unique_ptr<ValueChecker>& checker : pass->checkers) {
    if (!checker->mismatch().has_value()) continue;
    *result->add_mismatches() = *checker->mismatch();
    result->mutable_mismatches(result->mismatches_size() - 1)->set_file(work.path());
  }
  return absl::OkStatus();
}

}  // namespace quern::worker
