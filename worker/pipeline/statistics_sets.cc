#include "worker/pipeline/statistics_sets.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/pipeline/tiling.h"
#include "worker/pipeline/weight_feed.h"

namespace quern::worker {

StatisticsSets::StatisticsSets(TaskContext* context, const std::vector<const quern::v1::QuantizeUnit*>& units) : context_(*context) {
  for (const quern::v1::QuantizeUnit* unit : units) {
    if (!unit->statistics_key().empty()) ++sets_[unit->statistics_key()].uses[TextOf(unit->weight())];
  }
}

absl::StatusOr<StatisticsSets::Pass> StatisticsSets::Observe(const quern::v1::QuantizeUnit& unit, const quant::Scheme& scheme,
                                                             const std::shared_ptr<WeightReader>& weight,
                                                             const std::shared_ptr<const LoadedInputs>& inputs) {
  const std::string what = absl::StrCat("module ", unit.module());
  if (unit.statistics_set_size() > 1 && !scheme.SharesSetScale()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": weights have no scale in common under ", unit.scheme()));
  }
  const std::string own = TextOf(unit.weight());
  std::vector<std::string> members;
  for (const quern::v1::TensorView& view : unit.statistics_set()) members.push_back(TextOf(view));
  if (members.empty()) members.push_back(own);
  if (std::find(members.begin(), members.end(), own) == members.end()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": its weight is not in the set that makes its scale"));
  }
  Set alone;
  Set* set = &alone;
  if (unit.statistics_key().empty()) {
    alone.uses[own] = 1;
  } else {
    set = &sets_[unit.statistics_key()];
  }
  if (set->statistics == nullptr) {
    set->scheme = unit.scheme();
    set->members = members;
    QUERN_RETURN_IF_ERROR(Begin(unit, scheme, weight, inputs, *set));
  } else if (set->scheme != unit.scheme() || set->members != members) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the set \"", unit.statistics_key(), "\" has other weights or another scheme in an earlier module"));
  }
  Pass pass;
  pass.statistics = set->statistics;
  if (const auto held = set->held.find(own); held != set->held.end()) pass = held->second;
  if (--set->uses[own] <= 0) {
    set->uses.erase(own);
    set->held.erase(own);
  }
  if (set->uses.empty() && !unit.statistics_key().empty()) sets_.erase(unit.statistics_key());
  return pass;
}

bool StatisticsSets::MayHold(uint64_t bytes) {
  while (!holds_.empty() && holds_.front().uses == 0) {
    holds_.pop_front();
    ++first_ticket_;
  }
  // Behind the oldest hold that waits for a unit to begin, nothing is sure to come back. Where the ring closes, less than the largest part
  // is lost.
  uint64_t taken = 0, largest = bytes;
  for (const Hold& hold : holds_) {
    taken += hold.bytes;
    largest = std::max(largest, hold.bytes);
  }
  const uint64_t size = context_.sets().largest();
  return taken == 0 ? bytes <= size : taken + bytes + largest <= size;
}

absl::Status StatisticsSets::Begin(const quern::v1::QuantizeUnit& unit, const quant::Scheme& scheme,
                                   const std::shared_ptr<WeightReader>& weight, const std::shared_ptr<const LoadedInputs>& inputs,
                                   Set& set) {
  set.statistics = std::make_shared<SetStatistics>();
  const std::string own = TextOf(unit.weight());
  for (size_t i = 0; i < set.members.size(); ++i) {
    const std::string& member = set.members[i];
    std::shared_ptr<WeightReader> reader = weight;
    if (member != own) {
      QUERN_ASSIGN_OR_RETURN(reader, WeightReader::For(unit.statistics_set(static_cast<int>(i)), context_.sources()));
      if (reader->shape().rows == 0 || reader->shape().cols == 0) continue;
      QUERN_RETURN_IF_ERROR(Annotate(scheme.CheckWeight(reader->dtype(), reader->shape()), reader->What()));
    }
    std::shared_ptr<WeightSlab> slab;
    const uint64_t bytes = RoundUp(WeightSlab::BytesFor(*reader, reader->shape().rows), kIoBlock);
    const auto uses = set.uses.find(member);
    if (uses != set.uses.end() && set.held.find(member) == set.held.end() && MayHold(bytes)) {
      std::optional<PoolBuffer> memory;
      QUERN_RETURN_IF_ERROR(context_.engine().WaitUntil([&](absl::Duration timeout) {
        memory = context_.sets().Acquire(bytes, timeout);
        return memory.has_value();
      }));
      QUERN_ASSIGN_OR_RETURN(slab, WeightSlab::Start(context_, reader, 0, reader->shape().rows, *std::move(memory)));
      holds_.push_back({bytes, uses->second});
      set.held[member] = {set.statistics, slab, first_ticket_ + holds_.size()};
    }
    // Inputs are of one module: they are of no use for the scale of several.
    const std::shared_ptr<const LoadedInputs> of_all = set.members.size() == 1 ? inputs : std::make_shared<const LoadedInputs>();
    QUERN_RETURN_IF_ERROR(ObserveWeight(context_, scheme, weight->shape(), reader, slab, of_all, set.statistics));
  }
  return StartMerge(context_, absl::StrCat("module ", unit.module()), set.statistics);
}

void StatisticsSets::Started(const Pass& pass) {
  // Tickets count from 1, so that 0 is none.
  if (pass.ticket > first_ticket_) --holds_[pass.ticket - first_ticket_ - 1].uses;
}

absl::StatusOr<std::shared_ptr<const SetStatistics>> StatisticsSets::ObserveOne(TaskContext& context, const quant::Scheme& scheme,
                                                                                const std::shared_ptr<WeightReader>& weight,
                                                                                const std::shared_ptr<const LoadedInputs>& inputs) {
  auto statistics = std::make_shared<SetStatistics>();
  QUERN_RETURN_IF_ERROR(ObserveWeight(context, scheme, weight->shape(), weight, nullptr, inputs, statistics));
  QUERN_RETURN_IF_ERROR(StartMerge(context, weight->tensor(), statistics));
  return statistics;
}

absl::Status StatisticsSets::ObserveWeight(TaskContext& context, const quant::Scheme& scheme, quant::Shape2D shape,
                                           const std::shared_ptr<WeightReader>& reader, const std::shared_ptr<WeightSlab>& slab,
                                           const std::shared_ptr<const LoadedInputs>& inputs,
                                           const std::shared_ptr<SetStatistics>& statistics) {
  WeightFeed feed(&context, reader, slab, inputs->awaits());
  QUERN_ASSIGN_OR_RETURN(const Tiling::Request request, feed.StartRequest(scheme.RowMultiple(), scheme.ColumnMultiple()));
  QUERN_ASSIGN_OR_RETURN(const Tiling tiling, Tiling::For(request));
  return feed.ForEachTile(tiling, [&](const TileRange& range) {
    WeightFeed::Work work;
    work.holds = statistics->observed_;
    work.compute = [&scheme, shape, range, inputs, statistics, path = reader->path(),
                    part_rows = CacheRows(reader->row_bytes(), request.row_multiple)](const std::shared_ptr<const SourceTile>& tile,
                                                                                      std::byte*, Step::Done done) {
      std::unique_ptr<quant::Statistics> partial;
      {
        MutexLock lock(&statistics->mutex_);
        if (!statistics->partial_.empty()) {
          partial = std::move(statistics->partial_.back());
          statistics->partial_.pop_back();
        }
      }
      if (partial == nullptr) partial = scheme.NewStatistics(shape);
      absl::Status status;
      for (int64_t row = range.row_begin; status.ok() && row < range.row_end; row += part_rows) {
        const absl::StatusOr<quant::Tile> rows = tile->Rows(row, std::min(row + part_rows, range.row_end));
        status = rows.ok() ? scheme.Observe(*rows, inputs->Get(), *partial) : rows.status();
      }
      {
        MutexLock lock(&statistics->mutex_);
        statistics->partial_.push_back(std::move(partial));
      }
      done(Annotate(status, path));
    };
    return feed.Start(range, std::move(work));
  });
}

absl::Status StatisticsSets::StartMerge(TaskContext& context, const std::string& what, const std::shared_ptr<SetStatistics>& statistics) {
  auto step = std::make_unique<Step>();
  step->what = what;
  step->awaits.push_back(statistics->observed_);
  step->holds = statistics->ready_;
  step->compute = [statistics](Step::Done done) {
    {
      MutexLock lock(&statistics->mutex_);
      for (std::unique_ptr<quant::Statistics>& partial : statistics->partial_) {
        if (statistics->result_ == nullptr) {
          statistics->result_ = std::move(partial);
        } else {
          statistics->result_->Merge(*partial);
        }
      }
      statistics->partial_.clear();
    }
    done(absl::OkStatus());
  };
  return context.engine().Start(std::move(step));
}

}  // namespace quern::worker
