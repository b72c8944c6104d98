#include "quant/kernels/integer_tile.h"

namespace quern::quant {

scalar::Problem Encode(const IntegerTile& tile, const EncodeOptions& options) { return EncodeScalar(tile, options); }
void Decode(const IntegerTile& tile, unsigned char* elements, int64_t element_stride) { DecodeScalar(tile, elements, element_stride); }
void Observe(const IntegerTile& tile, scalar::Range* ranges) { ObserveScalar(tile, ranges); }
void AddErrors(const IntegerTile& tile, const unsigned char* decoded, int64_t decoded_stride, RowError* errors) {
  AddErrorsScalar(tile, decoded, decoded_stride, errors);
}
std::string ActiveTarget() { return "SCALAR"; }

}  // namespace quern::quant
