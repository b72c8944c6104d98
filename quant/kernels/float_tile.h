// A tile of work for the kernels of 8- and 4-bit floats, with the addresses resolved: what the scalar definition and every faster kernel
// take.
#ifndef QUERN_QUANT_KERNELS_FLOAT_TILE_H_
#define QUERN_QUANT_KERNELS_FLOAT_TILE_H_

#include <cstdint>

#include "quant/kernels/integer_tile.h"
#include "quant/row_error.h"
#include "quant/scalar/float_rtn.h"
#include "quant/scalar/float_search.h"

namespace quern::quant {

struct FloatTile {
  scalar::FloatFormat format;
  ElementType element = ElementType::kBf16;
  int64_t rows = 0, columns = 0;
  // Columns that share a scale. 16 for the NVFP4 formats, 32 for MX, of which `columns` is a multiple; else a multiple of 32, or all
  // columns and more. With kGiven the last group may be cut.
  int64_t group = 0;

  const unsigned char* elements = nullptr;  // row r at elements + r * element_stride
  int64_t element_stride = 0;

  unsigned char* codes = nullptr;  // row r at codes + r * code_stride, and so on
  int64_t code_stride = 0;
  unsigned char* scales = nullptr;  // null with kGiven
  int64_t scale_stride = 0;
  const scalar::FloatScale* given = nullptr;  // kGiven only
  int64_t given_stride = 0;                   // 0: all rows have the same scales
  float set_scale = 1;                        // the NVFP4 formats only
};

// Encoding has these besides.
struct FloatOptions {
  bool replace_nonfinite = false;
  // The scale bytes are there already, else the definition's are written.
  bool scales_chosen = false;
  RowError* errors = nullptr;  // one a row of the tile
};

inline scalar::FloatRow FloatRowOf(const FloatTile& tile, int64_t row) {
  scalar::FloatRow result;
  result.set_scale = tile.set_scale;
  if (tile.given != nullptr) result.given = tile.given + row * tile.given_stride;
  if (tile.scales != nullptr) result.scales = tile.scales + row * tile.scale_stride;
  if (tile.codes != nullptr) result.codes = tile.codes + row * tile.code_stride;
  return result;
}

// The definition, row by row.
scalar::Problem EncodeFloatsScalar(const FloatTile& tile, const FloatOptions& options);
void DecodeFloatsScalar(const FloatTile& tile, unsigned char* elements, int64_t element_stride);
// Extends amax[r * stride + g] by group g of row r; with a stride of 0 the rows share them.
void ObserveAmaxScalar(const FloatTile& tile, float* amax, int64_t stride);
// Writes the scale bytes of the blocks (of 16, the NVFP4 formats), searched for. The importance begins at the tile's first column.
void SearchFloatScalesScalar(const FloatTile& tile, const scalar::RangeSearch& search);
// The errors of `count` scales for the first row of a tile of FP8; `factor` scales differences.
void ErrorsOfScalesScalar(const FloatTile& tile, const scalar::RangeSearch& search, const scalar::FloatScale* scales, int count,
                          float factor, double* errors);
// scalar::LeastErrors of the blocks of a tile of one row, at its global scale.
void LeastErrorsScalar(const FloatTile& tile, const float* amax, float* errors);

// The same, by the kernels of the best SIMD target of this machine: equal bit for bit.
scalar::Problem EncodeFloats(const FloatTile& tile, const FloatOptions& options);
void DecodeFloats(const FloatTile& tile, unsigned char* elements, int64_t element_stride);
void ObserveAmax(const FloatTile& tile, float* amax, int64_t stride);
void SearchFloatScales(const FloatTile& tile, const scalar::RangeSearch& search);
void ErrorsOfScales(const FloatTile& tile, const scalar::RangeSearch& search, const scalar::FloatScale* scales, int count, float factor,
                    double* errors);
void LeastErrors(const FloatTile& tile, const float* amax, float* errors);

}  // namespace quern::quant

#endif  // QUERN_QUANT_KERNELS_FLOAT_TILE_H_
