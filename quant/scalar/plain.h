// Plain values: the definition of rounding a weight of dtype D to another plain dtype P. Built-in types only, so that nvcc compiles the
// same text.
//
// A value is rounded to P, ties to even. A finite one that has no finite neighbour there (65520 and above in F16) is reported; where the
// caller goes on, the largest finite value of its sign stands for it and counts as replaced. NaN and Inf are reported or replaced as in
// every scheme, before they are rounded. The decoded value is that of P, rounded to D.
#ifndef QUERN_QUANT_SCALAR_PLAIN_H_
#define QUERN_QUANT_SCALAR_PLAIN_H_

#include <cstdint>
#include <cstring>

#include "quant/row_error.h"
#include "quant/scalar/float_formats.h"
#include "quant/scalar/integer_rtn.h"

namespace quern::quant::scalar {

// Rounds `columns` elements of one row, which begin at a multiple of 32 columns. Without `replace` the first one that is not finite
// (kNan, kInf) or that P cannot hold (kOverflow) stops the work.
template <class D, class P>
QUERN_HOST_DEVICE inline Problem EncodePlainPiece(const unsigned char* elements, int64_t columns, bool replace, unsigned char* out,
                                                  RowError& error) {
  for (int64_t i = 0; i < columns; ++i) {
    const typename D::Bits source = LoadElement<D>(elements, i);
    const bool finite = D::IsFinite(source);
    if (!finite && !replace) return {D::IsNan(source) ? Problem::kNan : Problem::kInf, 0, i};
    const float x = D::ToFloat(ReplaceNonfinite<D>(source));
    typename P::Bits bits = P::FromFloat(x);
    const bool fits = P::IsFinite(bits);
    if (!fits) {
      if (!replace) return {Problem::kOverflow, 0, i};
      bits = P::FromFloat(x < 0 ? -P::kLargest : P::kLargest);
    }
    if (!finite || !fits) ++error.nonfinite;
    memcpy(out + i * static_cast<int64_t>(sizeof bits), &bits, sizeof bits);
    AddError(error, i, x, D::Round(P::ToFloat(bits)));
  }
  return {};
}

// The inverse, rounded to D.
template <class D, class P>
QUERN_HOST_DEVICE inline void DecodePlainPiece(const unsigned char* in, int64_t columns, unsigned char* elements) {
  for (int64_t i = 0; i < columns; ++i) {
    const typename D::Bits bits = D::FromFloat(P::ToFloat(LoadElement<P>(in, i)));
    memcpy(elements + i * static_cast<int64_t>(sizeof bits), &bits, sizeof bits);
  }
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_PLAIN_H_
