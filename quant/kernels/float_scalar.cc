// The scalar definition applied to tiles.
#include "quant/kernels/float_tile.h"

namespace quern::quant {
namespace {

template <class D>
scalar::Problem EncodeRows(const FloatTile& tile, const FloatOptions& options) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const unsigned char* elements = tile.elements + row * tile.element_stride;
    const scalar::FloatRow out = FloatRowOf(tile, row);
    if (tile.format.scaling != scalar::FloatScaling::kGiven && !options.scales_chosen) {
      scalar::WriteScales<D>(tile.format, elements, tile.columns, tile.group, out);
    }
    scalar::Problem problem =
        scalar::EncodeFloats<D>(tile.format, elements, tile.columns, tile.group, options.replace_nonfinite, out, options.errors[row]);
    if (problem.kind != scalar::Problem::kNone) {
      problem.row = row;
      return problem;
    }
  }
  return {};
}

template <class D>
void DecodeRows(const FloatTile& tile, unsigned char* elements, int64_t element_stride) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::DecodeFloats<D>(tile.format, FloatRowOf(tile, row), tile.columns, tile.group, elements + row * element_stride);
  }
}

template <class D>
void ObserveRows(const FloatTile& tile, float* amax, int64_t stride) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::ExtendGroups<D>(tile.elements + row * tile.element_stride, tile.columns, tile.group, amax + row * stride);
  }
}

}  // namespace

scalar::Problem EncodeFloatsScalar(const FloatTile& tile, const FloatOptions& options) {
  return WithFormat(tile.element, [&](auto d) { return EncodeRows<decltype(d)>(tile, options); });
}

void DecodeFloatsScalar(const FloatTile& tile, unsigned char* elements, int64_t element_stride) {
  WithFormat(tile.element, [&](auto d) { DecodeRows<decltype(d)>(tile, elements, element_stride); });
}

void ObserveAmaxScalar(const FloatTile& tile, float* amax, int64_t stride) {
  WithFormat(tile.element, [&](auto d) { ObserveRows<decltype(d)>(tile, amax, stride); });
}

}  // namespace quern::quant
