#include "worker/pipeline/stack_slabs.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"
#include "base/status_macros.h"

namespace quern::worker {

absl::StatusOr<std::vector<StackSlab>> CutIntoSlabs(absl::Span<const quern::v1::QuantizeUnit* const> units) {
  const quern::v1::OutputTensor& output = units.front()->outputs(0);
  const auto invalid = [&](const quern::v1::QuantizeUnit& unit, absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", output.name(), ", module ", unit.module(), ": ", why));
  };
  QUERN_ASSIGN_OR_RETURN(const DType dtype, ParseDType(output.dtype()));
  if (BitsPerElement(dtype) % 8 != 0) return invalid(*units.front(), absl::StrCat(output.dtype(), " has no byte size"));
  const auto element = static_cast<uint64_t>(BytesPerElement(dtype));
  std::vector<StackSlab> slabs;
  uint64_t end = 0;
  for (size_t i = 0; i < units.size();) {
    const quern::v1::QuantizeUnit& unit = *units[i];
    const uint64_t rows = unit.weight().rows(), cols = unit.weight().cols();
    const uint64_t left = output.size() - end;
    if (unit.place().offset() != end) return invalid(unit, absl::StrCat("it is placed at ", unit.place().offset(), ", not at ", end));
    if (rows == 0 || cols == 0 || __int128{rows} * cols > left / element || unit.place().row_stride() <= 0 ||
        unit.place().col_stride() <= 0) {
      return invalid(unit, absl::StrCat("[", rows, ", ", cols, "] elements do not fit the ", left, " bytes that are left"));
    }
    const auto row_stride = static_cast<uint64_t>(unit.place().row_stride()), col_stride = static_cast<uint64_t>(unit.place().col_stride());
    StackSlab slab{i, 1, output.offset() + end, rows * cols * element, 0};
    if (col_stride != element || row_stride != cols * element) {
      // A row of the slab holds so many columns.
      if (col_stride % (rows * element) != 0 || col_stride > left / cols) return invalid(unit, "its columns do not make dense rows");
      slab.count = col_stride / (rows * element);
      slab.row_bytes = col_stride;
      slab.size = cols * col_stride;
      if (slab.count > units.size() - i)
        return invalid(unit, absl::StrCat(slab.count, " modules lie together, ", units.size() - i, " are left"));
      const bool side_by_side = row_stride == element;
      if (!side_by_side && row_stride != slab.count * element) return invalid(unit, "its rows neither follow each other nor alternate");
      for (size_t k = 1; k < slab.count; ++k) {
        const quern::v1::QuantizeUnit& other = *units[i + k];
        const bool alike = other.weight().rows() == rows && other.weight().cols() == cols &&
                           other.place().row_stride() == unit.place().row_stride() &&
                           other.place().col_stride() == unit.place().col_stride();
        if (!alike || other.place().offset() != end + k * (side_by_side ? rows * element : element)) {
          return invalid(other, absl::StrCat("it does not stand beside ", unit.module()));
        }
      }
    }
    end += slab.size;
    i += slab.count;
    slabs.push_back(slab);
  }
  if (end != output.size()) return invalid(*units.back(), absl::StrCat("the last module ends at ", end, " of ", output.size(), " bytes"));
  return slabs;
}

}  // namespace quern::worker
