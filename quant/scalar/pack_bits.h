// Codes of 2 .. 8 bits as a dense little-endian bit stream: code i of a row stands at bits i*b, so that codes of 3, 5, 6 and 7 bits
// straddle words. Rows end at a word of 32 bits, the bits after the last code are 0. Built-in types only, so that nvcc compiles the same
// text.
//
// Example, 3 bits: the codes 1 2 3 4 5 6 7 0 1 2 7 are the words 0xD11F58D1 0x00000001: code 10 has two bits in the first word, one in the
// second.
#ifndef QUERN_QUANT_SCALAR_PACK_BITS_H_
#define QUERN_QUANT_SCALAR_PACK_BITS_H_

#include <cstdint>
#include <cstring>

#include "quant/scalar/float_formats.h"

namespace quern::quant::scalar {

// Bytes of a packed row: whole words.
QUERN_HOST_DEVICE inline int64_t PackedBytes(int64_t codes, int bits) { return (codes * bits + 31) / 32 * 4; }

// Writes a stream of unsigned codes. `out` needs no alignment. Finish pads the last word with zeros.
class BitWriter {
 public:
  QUERN_HOST_DEVICE BitWriter(unsigned char* out, int bits) : out_(out), bits_(bits) {}
  QUERN_HOST_DEVICE void Put(uint32_t code) {
    word_ |= uint64_t{code} << filled_;
    filled_ += bits_;
    if (filled_ >= 32) Flush();
  }
  QUERN_HOST_DEVICE void Finish() {
    if (filled_ > 0) Flush();
  }

 private:
  QUERN_HOST_DEVICE void Flush() {
    const uint32_t low = static_cast<uint32_t>(word_);
    memcpy(out_, &low, sizeof low);
    out_ += sizeof low;
    word_ >>= 32;
    filled_ -= 32;
  }

  unsigned char* out_;
  int bits_;
  uint64_t word_ = 0;
  int filled_ = 0;
};

// The code at `index` of a stream that begins at `in`. Reads only the words that hold it.
QUERN_HOST_DEVICE inline uint32_t UnpackCode(const unsigned char* in, int64_t index, int bits) {
  const int64_t bit = index * bits;
  const int shift = static_cast<int>(bit % 32);
  uint32_t words[2] = {};
  memcpy(words, in + bit / 32 * 4, shift + bits > 32 ? 8 : 4);
  return static_cast<uint32_t>(((uint64_t{words[1]} << 32 | words[0]) >> shift) & ((1u << bits) - 1));
}

// Where the code of one weight row stands in a region that is packed along rows: in word row `word`, from bit `shift`; the rest of a code
// that straddles is in the next word row.
struct ColumnPosition {
  int64_t word;
  int shift;
  bool straddles;
};

QUERN_HOST_DEVICE inline ColumnPosition PositionInColumn(int64_t row, int bits) {
  const int64_t bit = row * bits;
  const int shift = static_cast<int>(bit % 32);
  return {bit / 32, shift, shift + bits > 32};
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_PACK_BITS_H_
