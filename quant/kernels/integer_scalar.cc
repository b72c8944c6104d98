// The scalar definition applied to tiles.
#include "quant/kernels/integer_tile.h"

namespace quern::quant {
namespace {

template <class D>
scalar::Problem EncodeRows(const IntegerTile& tile, const EncodeOptions& options) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::Problem problem =
        scalar::EncodePiece<D>(tile.format, tile.elements + row * tile.element_stride, tile.columns, tile.group, FixedOfRow(options, row),
                               options.replace_nonfinite, OutputOfRow(tile, row), options.errors[row]);
    if (problem.kind != scalar::Problem::kNone) {
      problem.row = row;
      return problem;
    }
  }
  return {};
}

template <class D>
void DecodeRows(const IntegerTile& tile, unsigned char* elements, int64_t element_stride) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::DecodePiece<D>(tile.format, OutputOfRow(tile, row), tile.columns, tile.group, elements + row * element_stride);
  }
}

template <class D>
void ObserveRows(const IntegerTile& tile, scalar::Range* ranges) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const unsigned char* elements = tile.elements + row * tile.element_stride;
    for (int64_t i = 0; i < tile.columns; ++i) scalar::Extend<D>(ranges[row], scalar::LoadElement<D>(elements, i));
  }
}

template <class D>
void AddRowErrors(const IntegerTile& tile, const unsigned char* decoded, int64_t decoded_stride, RowError* errors) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::AddErrorsOfPiece<D>(tile.elements + row * tile.element_stride, decoded + row * decoded_stride, tile.columns, errors[row]);
  }
}

}  // namespace

scalar::Problem EncodeScalar(const IntegerTile& tile, const EncodeOptions& options) {
  return WithFormat(tile.element, [&](auto d) { return EncodeRows<decltype(d)>(tile, options); });
}

void DecodeScalar(const IntegerTile& tile, unsigned char* elements, int64_t element_stride) {
  WithFormat(tile.element, [&](auto d) { DecodeRows<decltype(d)>(tile, elements, element_stride); });
}

void ObserveScalar(const IntegerTile& tile, scalar::Range* ranges) {
  WithFormat(tile.element, [&](auto d) { ObserveRows<decltype(d)>(tile, ranges); });
}

void AddErrorsScalar(const IntegerTile& tile, const unsigned char* decoded, int64_t decoded_stride, RowError* errors) {
  WithFormat(tile.element, [&](auto d) { AddRowErrors<decltype(d)>(tile, decoded, decoded_stride, errors); });
}

}  // namespace quern::quant
