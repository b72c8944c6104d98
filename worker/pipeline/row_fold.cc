#include "worker/pipeline/row_fold.h"

#include <algorithm>

namespace quern::worker {

void RowFold::Fold(const std::vector<RowResult>& rows) {
  for (const RowResult& row : rows) {
    total_.sum_squared_error += row.sum_squared_error;
    total_.sum_squares += row.sum_squares;
    total_.max_abs = std::max(total_.max_abs, row.max_abs);
    total_.nonfinite += row.nonfinite;
    digest_.AddRow(row.digest);
  }
  next_ += rows.size();
}

void RowFold::Add(uint64_t first, std::vector<RowResult> rows) {
  MutexLock lock(&mutex_);
  if (first != next_) {
    ahead_.emplace(first, std::move(rows));
    return;
  }
  Fold(rows);
  for (auto it = ahead_.begin(); it != ahead_.end() && it->first == next_; it = ahead_.erase(it)) Fold(it->second);
}

quern::v1::ModuleError RowFold::Error() const {
  MutexLock lock(&mutex_);
  quern::v1::ModuleError error;
  error.set_sum_squared_error(total_.sum_squared_error);
  error.set_sum_squares(total_.sum_squares);
  error.set_max_abs_error(total_.max_abs);
  error.set_nonfinite(total_.nonfinite);
  return error;
}

std::string RowFold::Digest() const {
  MutexLock lock(&mutex_);
  return digest_.Digest();
}

}  // namespace quern::worker
