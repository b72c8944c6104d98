// Copies a two-dimensional array whose elements stand any number of bytes apart into dense rows: transposed and interleaved weights.
#ifndef QUERN_WORKER_PIPELINE_STRIDED_COPY_H_
#define QUERN_WORKER_PIPELINE_STRIDED_COPY_H_

#include <cstddef>
#include <cstdint>

namespace quern::worker {

// Writes element (r, c), which stands at columns[c] + r * step, to out + r * out_stride + c * element_size. `columns` holds `cols`
// addresses of any alignment. element_size is 1, 2 or 4. Fast where columns are dense (step == element_size).
void CopyColumns(const std::byte* const* columns, int64_t cols, int64_t rows, int64_t step, int element_size, std::byte* out,
                 int64_t out_stride);

// Writes the elements at from, from + step, ... to out, dense.
void CopyRow(const std::byte* from, int64_t step, int64_t count, int element_size, std::byte* out);

// The way back: writes element (r, c) of dense rows `from_stride` bytes apart to out + c * out_stride + r * out_step. element_size is 2 or
// 4; addresses have any alignment.
void CopyTransposed(const std::byte* from, int64_t from_stride, int64_t rows, int64_t cols, int element_size, std::byte* out,
                    int64_t out_stride, int64_t out_step);

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_STRIDED_COPY_H_
