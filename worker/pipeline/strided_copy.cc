#include "worker/pipeline/strided_copy.h"

#include <string.h>

#include <algorithm>
#include <vector>

namespace quern::worker {
namespace {

// Rows whose lines of the output stay in the cache while the columns of a line are filled in, and those columns.
constexpr int64_t kBlockRows = 32;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kColumns = 8;  // at a time

template <class T>
T Load(const std::byte* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

// kStep: bytes between the rows of a column; 0: `step` says.
template <class T, int64_t kStep>
void Columns(const std::byte* const* columns, int64_t cols, int64_t rows, int64_t step, std::byte* out, int64_t out_stride) {
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T));
  if constexpr (kStep != 0) step = kStep;
  for (int64_t row_begin = 0; row_begin < rows; row_begin += kBlockRows) {
    const int64_t row_end = std::min(row_begin + kBlockRows, rows);
    for (int64_t line = 0; line < cols; line += kLine) {
      const int64_t line_end = std::min(line + kLine, cols);
      int64_t col = line;
      for (; col + kColumns <= line_end; col += kColumns) {
        const std::byte* from[kColumns];
        for (int64_t i = 0; i < kColumns; ++i) from[i] = columns[col + i];
        std::byte* to = out + row_begin * out_stride + col * static_cast<int64_t>(sizeof(T));
        for (int64_t row = row_begin; row < row_end; ++row, to += out_stride) {
          T values[kColumns];
          for (int64_t i = 0; i < kColumns; ++i) values[i] = Load<T>(from[i] + row * step);
          memcpy(to, values, sizeof values);
        }
      }
      for (; col < line_end; ++col) {
        std::byte* to = out + row_begin * out_stride + col * static_cast<int64_t>(sizeof(T));
        for (int64_t row = row_begin; row < row_end; ++row, to += out_stride) memcpy(to, columns[col] + row * step, sizeof(T));
      }
    }
  }
}

template <class T>
void ColumnsOf(const std::byte* const* columns, int64_t cols, int64_t rows, int64_t step, std::byte* out, int64_t out_stride) {
  constexpr int64_t kDense = sizeof(T);
  if (step == kDense) {
    Columns<T, kDense>(columns, cols, rows, step, out, out_stride);
  } else if (step == 2 * kDense) {
    Columns<T, 2 * kDense>(columns, cols, rows, step, out, out_stride);
  } else {
    Columns<T, 0>(columns, cols, rows, step, out, out_stride);
  }
}

template <class T>
void RowOf(const std::byte* from, int64_t step, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) memcpy(out + i * static_cast<int64_t>(sizeof(T)), from + i * step, sizeof(T));
}

// Blocks of lines of the input and of the output that stay in the cache together.
template <class T>
void Spread(const std::byte* from, int64_t from_stride, int64_t rows, int64_t cols, std::byte* out, int64_t out_stride, int64_t out_step) {
  constexpr int64_t kSize = sizeof(T);
  constexpr int64_t kBlockCols = kLineBytes / kSize;
  for (int64_t row_begin = 0; row_begin < rows; row_begin += kBlockRows) {
    const int64_t row_end = std::min(row_begin + kBlockRows, rows);
    for (int64_t col_begin = 0; col_begin < cols; col_begin += kBlockCols) {
      const int64_t col_end = std::min(col_begin + kBlockCols, cols);
      for (int64_t col = col_begin; col < col_end; ++col) {
        const std::byte* at = from + row_begin * from_stride + col * kSize;
        std::byte* to = out + col * out_stride + row_begin * out_step;
        for (int64_t row = row_begin; row < row_end; ++row, at += from_stride, to += out_step) memcpy(to, at, sizeof(T));
      }
    }
  }
}

}  // namespace

void CopyTransposed(const std::byte* from, int64_t from_stride, int64_t rows, int64_t cols, int element_size, std::byte* out,
                    int64_t out_stride, int64_t out_step) {
  if (out_step == element_size) {
    std::vector<const std::byte*> columns(static_cast<size_t>(rows));
    for (int64_t row = 0; row < rows; ++row) columns[static_cast<size_t>(row)] = from + row * from_stride;
    CopyColumns(columns.data(), rows, cols, element_size, element_size, out, out_stride);
  } else if (element_size == 2) {
    Spread<uint16_t>(from, from_stride, rows, cols, out, out_stride, out_step);
  } else {
    Spread<uint32_t>(from, from_stride, rows, cols, out, out_stride, out_step);
  }
}

void CopyColumns(const std::byte* const* columns, int64_t cols, int64_t rows, int64_t step, int element_size, std::byte* out,
                 int64_t out_stride) {
  switch (element_size) {
    case 1:
      return ColumnsOf<uint8_t>(columns, cols, rows, step, out, out_stride);
    case 2:
      return ColumnsOf<uint16_t>(columns, cols, rows, step, out, out_stride);
    case 4:
      return ColumnsOf<uint32_t>(columns, cols, rows, step, out, out_stride);
  }
}

void CopyRow(const std::byte* from, int64_t step, int64_t count, int element_size, std::byte* out) {
  if (step == element_size) {
    memcpy(out, from, static_cast<size_t>(count * element_size));
    return;
  }
  switch (element_size) {
    case 1:
      return RowOf<uint8_t>(from, step, count, out);
    case 2:
      return RowOf<uint16_t>(from, step, count, out);
    case 4:
      return RowOf<uint32_t>(from, step, count, out);
  }
}

}  // namespace quern::worker
