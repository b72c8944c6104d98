// Figures of a module's rows, which finish in any order, folded in the order of rows: error sums and the view's digest.
#ifndef QUERN_WORKER_PIPELINE_ROW_FOLD_H_
#define QUERN_WORKER_PIPELINE_ROW_FOLD_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "quant/row_error.h"
#include "quern/v1/plan.pb.h"
#include "worker/pipeline/view_digest.h"

namespace quern::worker {

struct RowResult {
  double sum_squared_error = 0;
  double sum_squares = 0;
  double max_abs = 0;
  uint64_t nonfinite = 0;
  uint64_t digest = 0;  // XXH3-64 of the row's bytes

  void Set(const quant::RowError& error) {
    sum_squared_error = error.SumSquaredError();
    sum_squares = error.SumSquares();
    max_abs = error.max_abs;
    nonfinite = error.nonfinite;
  }
};

// Thread-safe. Keeps no more than the rows that came before their turn.
class RowFold {
 public:
  // Rows [first, first + rows.size()). Every row once.
  void Add(uint64_t first, std::vector<RowResult> rows);
  // After all rows: the figures, `module` and `count` left to the caller.
  quern::v1::ModuleError Error() const;
  std::string Digest() const;

 private:
  void Fold(const std::vector<RowResult>& rows) QUERN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  uint64_t next_ QUERN_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::vector<RowResult>> ahead_ QUERN_GUARDED_BY(mutex_);
  RowResult total_ QUERN_GUARDED_BY(mutex_);
  ViewDigester digest_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_ROW_FOLD_H_
