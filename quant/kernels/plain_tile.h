// A tile of work for the plain kernels: what the scalar definition and the faster kernels take.
#ifndef QUERN_QUANT_KERNELS_PLAIN_TILE_H_
#define QUERN_QUANT_KERNELS_PLAIN_TILE_H_

#include <cstdint>

#include "quant/kernels/integer_tile.h"
#include "quant/row_error.h"
#include "quant/scalar/plain.h"

namespace quern::quant {

struct PlainTile {
  ElementType element = ElementType::kBf16;  // D, of the weight
  ElementType plain = ElementType::kBf16;    // P, as stored
  int64_t rows = 0, columns = 0;
  const unsigned char* elements = nullptr;  // row r at elements + r * element_stride
  int64_t element_stride = 0;
  unsigned char* values = nullptr;  // row r at values + r * value_stride
  int64_t value_stride = 0;
};

// The definition, row by row; `errors` has one entry a row.
scalar::Problem EncodePlainScalar(const PlainTile& tile, bool replace_nonfinite, RowError* errors);
void DecodePlainScalar(const PlainTile& tile, unsigned char* elements, int64_t element_stride);

// The same, by the kernels of the best SIMD target of this machine: equal bit for bit.
scalar::Problem EncodePlain(const PlainTile& tile, bool replace_nonfinite, RowError* errors);
void DecodePlain(const PlainTile& tile, unsigned char* elements, int64_t element_stride);

}  // namespace quern::quant

#endif  // QUERN_QUANT_KERNELS_PLAIN_TILE_H_
