// Tasks that write a shard: header, then copied, quantized and generated tensors in the order of the file.
#include <string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "worker/pipeline/generate.h"
#include "worker/pipeline/module_writer.h"
#include "worker/pipeline/stack_slabs.h"
#include "worker/pipeline/stack_writer.h"
#include "worker/pipeline/statistics_sets.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/view_digest.h"

namespace quern::worker {
namespace {

// Filled by the last step of a copy.
struct CopyState {
  Xxh3Stream stream;
  std::string digest;
};

std::string DigestOfOneRow(uint64_t row) {
  ViewDigester digester;
  digester.AddRow(row);
  return digester.Digest();
}

class ShardWriter {
 public:
  explicit ShardWriter(TaskContext& context) : context_(context) {}

  absl::Status Run(const quern::v1::WriteShard& work, quern::v1::TaskResult* result) {
    QUERN_RETURN_IF_ERROR(CheckLayout(work));
    QUERN_RETURN_IF_ERROR(context_.CreateOutput(work.file_size()));
    QUERN_RETURN_IF_ERROR(PutHeader(work.header()));
    std::vector<const quern::v1::QuantizeUnit*> quantized;
    for (const quern::v1::ShardUnit& unit : work.units()) {
      if (unit.has_quantize()) quantized.push_back(&unit.quantize());
    }
    sets_.emplace(&context_, quantized);
    for (int i = 0; i < work.units_size(); ++i) {
      const quern::v1::ShardUnit& unit = work.units(i);
      switch (unit.kind_case()) {
        case quern::v1::ShardUnit::kCopy:
          QUERN_RETURN_IF_ERROR(Copy(unit.copy()));
          break;
        case quern::v1::ShardUnit::kQuantize:
          if (unit.quantize().has_place()) {
            std::vector<const quern::v1::QuantizeUnit*> stacked = {&unit.quantize()};
            while (i + 1 < work.units_size() && SharesTensor(unit.quantize(), work.units(i + 1))) {
              stacked.push_back(&work.units(++i).quantize());
            }
            QUERN_RETURN_IF_ERROR(Stack(stacked));
          } else {
            tensors_ += unit.quantize().outputs_size();
            QUERN_RETURN_IF_ERROR(Quantize(unit.quantize()));
          }
          break;
        case quern::v1::ShardUnit::kGenerate:
          QUERN_RETURN_IF_ERROR(Generate(unit.generate()));
          break;
        case quern::v1::ShardUnit::KIND_NOT_SET:
          return absl::InvalidArgumentError("a unit of the plan is of a kind that this worker does not know");
      }
    }
    QUERN_RETURN_IF_ERROR(context_.engine().Drain());
    QUERN_RETURN_IF_ERROR(context_.engine().WaitUntil([this](absl::Duration timeout) { return context_.output().Drained(timeout); }));
    // Weights replaced while they were read must not pass for the ones that were planned.
    QUERN_RETURN_IF_ERROR(context_.CheckSourcesAgain());
    QUERN_ASSIGN_OR_RETURN(const std::string sha256, context_.output().Finish());
    for (const std::function<void(quern::v1::TaskResult*)>& report : reports_) report(result);
    result->set_file_size(work.file_size());
    result->set_sha256(sha256);
    result->set_header_sha256(Sha256Of(work.header()));
    result->set_tensors_written(tensors_);
    return absl::OkStatus();
  }

 private:
  // Whether a unit fills a part of the same tensor as the placed one before it.
  static bool SharesTensor(const quern::v1::QuantizeUnit& before, const quern::v1::ShardUnit& unit) {
    const quern::v1::QuantizeUnit& next = unit.quantize();
    return next.has_place() && next.outputs_size() == 1 && next.outputs(0).name() == before.outputs(0).name() &&
           next.outputs(0).dtype() == before.outputs(0).dtype() && next.outputs(0).offset() == before.outputs(0).offset() &&
           next.outputs(0).size() == before.outputs(0).size();
  }

  // Header and tensors fill the file without holes.
  static absl::Status CheckLayout(const quern::v1::WriteShard& work) {
    uint64_t end = work.header().size();
    if (end == 0) return absl::InvalidArgumentError("the shard has no header");
    const auto next = [&end](const quern::v1::OutputTensor& tensor) -> absl::Status {
      if (tensor.offset() != end || tensor.size() > UINT64_MAX - end) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", tensor.name(), ": planned at ", tensor.offset(), ", but the one before ends at ", end));
      }
      end += tensor.size();
      return absl::OkStatus();
    };
    const quern::v1::QuantizeUnit* stacked = nullptr;  // the one before, if it fills a part of a tensor
    for (const quern::v1::ShardUnit& unit : work.units()) {
      const bool goes_on = stacked != nullptr && SharesTensor(*stacked, unit);
      stacked = unit.quantize().has_place() ? &unit.quantize() : nullptr;
      if (stacked != nullptr && stacked->outputs_size() != 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("module ", stacked->module(), ": it has a place in ", stacked->outputs_size(), " tensors"));
      }
      if (goes_on) continue;
      if (unit.has_copy()) QUERN_RETURN_IF_ERROR(next(unit.copy().output()));
      if (unit.has_generate()) QUERN_RETURN_IF_ERROR(next(unit.generate().output()));
      for (const quern::v1::OutputTensor& tensor : unit.quantize().outputs()) QUERN_RETURN_IF_ERROR(next(tensor));
    }
    if (end != work.file_size()) {
      return absl::InvalidArgumentError(absl::StrCat("the shard is planned with ", work.file_size(), " bytes, its tensors end at ", end));
    }
    return absl::OkStatus();
  }

  uint64_t piece() const { return std::min<uint64_t>(context_.layout().window, context_.preferred_tile()); }

  absl::Status PutHeader(const std::string& header) {
    for (uint64_t at = 0; at < header.size(); at += piece()) {
      const uint64_t size = std::min<uint64_t>(piece(), header.size() - at);
      QUERN_RETURN_IF_ERROR(context_.Reserve(size));
      memcpy(context_.output().At(at), header.data() + at, size);
      context_.output().Complete(at, size);
    }
    return absl::OkStatus();
  }

  absl::Status Copy(const quern::v1::CopyUnit& unit) {
    const quern::v1::TensorView& source = unit.source();
    const quern::v1::OutputTensor& output = unit.output();
    const std::vector<SourceHandle>& files = context_.sources();
    ++tensors_;
    if (source.file() >= files.size()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", output.name(), ": the task has no source file ", source.file()));
    }
    const SourceHandle* const file = &files[source.file()];
    const uint64_t size = output.size();
    if (source.rows() != 1 || source.cols() != size || source.offset() > file->size || size > file->size - source.offset()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", source.tensor(), ": ", size, " bytes at ", source.offset(), " lead out of ",
                                                     file->path, ", or the view is no single row of them"));
    }
    auto state = std::make_shared<CopyState>();
    reports_.push_back([state, name = source.tensor()](quern::v1::TaskResult* result) {
      quern::v1::ViewDigest* digest = result->add_source_digests();
      digest->set_tensor(name);
      digest->set_digest(state->digest);
    });
    if (size == 0) state->digest = DigestOfOneRow(Xxh3Of(nullptr, 0));
    const std::shared_ptr<Strand> strand = size > piece() ? std::make_shared<Strand>() : nullptr;
    for (uint64_t at = 0; at < size; at += piece()) {
      const uint64_t part = std::min(piece(), size - at);
      const uint64_t from = source.offset() + at;
      QUERN_RETURN_IF_ERROR(context_.Reserve(part));
      auto step = std::make_unique<Step>();
      step->what = absl::StrCat("tensor ", source.tensor());
      QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(BufferFor(from, part)));
      step->reads.push_back({file, from, part, step->buffer.data(), nullptr});
      step->strand = strand;
      step->compute = [this, state, data = step->buffer.data() + from % kIoBlock, to = output.offset() + at, part,
                       last = at + part == size](Step::Done done) {
        memcpy(context_.output().At(to), data, part);
        state->stream.Update(data, part);
        context_.output().Complete(to, part);
        if (last) state->digest = DigestOfOneRow(state->stream.Digest64());
        done(absl::OkStatus());
      };
      QUERN_RETURN_IF_ERROR(context_.engine().Start(std::move(step)));
    }
    return absl::OkStatus();
  }

  absl::Status Quantize(const quern::v1::QuantizeUnit& unit) {
    QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<ModuleWriter> writer, ModuleWriter::Create(&context_, &*sets_, unit));
    ReportModule(unit, writer->fold(), writer->shape());
    return writer->Start();
  }

  // Units that fill one tensor.
  absl::Status Stack(const std::vector<const quern::v1::QuantizeUnit*>& units) {
    ++tensors_;
    QUERN_ASSIGN_OR_RETURN(const std::vector<StackSlab> slabs, CutIntoSlabs(units));
    for (const StackSlab& slab : slabs) {
      if (slab.row_bytes == 0) {
        QUERN_RETURN_IF_ERROR(Quantize(*units[slab.first]));
        continue;
      }
      QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<StackWriter> writer, StackWriter::Create(&context_, units, slab));
      for (size_t i = 0; i < slab.count; ++i) ReportModule(*units[slab.first + i], writer->fold(i), writer->shape(i));
      QUERN_RETURN_IF_ERROR(writer->Start());
    }
    return absl::OkStatus();
  }

  void ReportModule(const quern::v1::QuantizeUnit& unit, std::shared_ptr<const RowFold> fold, quant::Shape2D shape) {
    reports_.push_back([fold = std::move(fold), &unit, shape](quern::v1::TaskResult* result) {
      quern::v1::ModuleError* error = result->add_errors();
      *error = fold->Error();
      error->set_module(unit.module());
      error->set_count(static_cast<uint64_t>(shape.rows) * static_cast<uint64_t>(shape.cols));
      quern::v1::ViewDigest* digest = result->add_source_digests();
      digest->set_tensor(unit.weight().tensor());
      digest->set_digest(fold->Digest());
    });
  }

  absl::Status Generate(const quern::v1::GenerateUnit& unit) {
    ++tensors_;
    QUERN_ASSIGN_OR_RETURN(const Generator made, Generator::For(unit));
    const auto generator = std::make_shared<const Generator>(made);
    const uint64_t element_size = generator->element_size();
    const uint64_t size = unit.output().size();
    for (uint64_t at = 0; at < size; at += piece()) {
      const uint64_t part = std::min(piece(), size - at);
      QUERN_RETURN_IF_ERROR(context_.Reserve(part));
      auto step = std::make_unique<Step>();
      step->what = absl::StrCat("tensor ", unit.output().name());
      step->compute = [this, generator, first = at / element_size, count = part / element_size, to = unit.output().offset() + at,
                       part](Step::Done done) {
        generator->Fill(first, count, context_.output().At(to));
        context_.output().Complete(to, part);
        done(absl::OkStatus());
      };
      QUERN_RETURN_IF_ERROR(context_.engine().Start(std::move(step)));
    }
    return absl::OkStatus();
  }

  TaskContext& context_;
  std::optional<StatisticsSets> sets_;
  uint64_t tensors_ = 0;
  std::vector<std::function<void(quern::v1::TaskResult*)>> reports_;  // in the order of the units
};

}  // namespace

absl::Status RunWriteShard(TaskContext& context, const quern::v1::WriteShard& work, quern::v1::TaskResult* result) {
  ShardWriter writer(context);
  absl::Status status = writer.Run(work, result);
  // Its steps refer to the writer.
  context.engine().Stop();
  return status;
}

}  // namespace quern::worker
