#include "daemon/planner/shard_writer.h"

#include <utility>

#include "daemon/planner/minimum_memory.h"

namespace quern::daemon {

uint64_t TensorBytes(DType dtype, const std::vector<uint64_t>& shape) {
  uint64_t bits = static_cast<uint64_t>(BitsPerElement(dtype));
  for (uint64_t dimension : shape) bits *= dimension;
  return bits / 8;
}

quern::v1::TensorView TaskSources::Start(const checkpoint::TensorLocation& location) {
  const auto [entry, added] = numbers_.try_emplace(location.shard, task_.source_files_size());
  if (added) *task_.add_source_files() = files_.source_files(static_cast<int>(location.shard));
  quern::v1::TensorView view;
  view.set_file(entry->second);
  view.set_tensor(location.info->name);
  view.set_offset(checkpoint_.shards()[location.shard].header.data_start + location.info->begin);
  return view;
}

quern::v1::TensorView TaskSources::Weight(const SourceWeight& weight) {
  quern::v1::TensorView view = Start(checkpoint_.tensors()[weight.tensor]);
  view.set_dtype(std::string(DTypeName(weight.dtype)));
  view.set_rows(weight.rows);
  view.set_cols(weight.cols);
  if (weight.decoder == nullptr) {
    view.set_offset(view.offset() + weight.offset);
    view.set_row_stride(static_cast<int64_t>(weight.row_stride));
    view.set_col_stride(static_cast<int64_t>(weight.col_stride));
    return view;
  }
  view.set_decode_scheme(weight.decoder->spec().ToString());
  for (const SourceRegion& region : weight.regions) {
    quern::v1::DecodeInput& input = *view.add_decode();
    input.set_role(region.role);
    quern::v1::TensorView& bytes = *input.mutable_view();
    bytes = Start(checkpoint_.tensors()[region.tensor]);
    bytes.set_dtype("U8");
    bytes.set_offset(bytes.offset() + region.offset);
    bytes.set_rows(region.rows);
    bytes.set_cols(region.row_bytes);
    bytes.set_col_stride(1);
    bytes.set_row_stride(static_cast<int64_t>(region.row_stride));
  }
  view.set_offset(view.decode(0).view().offset());
  return view;
}

quern::v1::TensorView TaskSources::Bytes(const checkpoint::TensorLocation& location) {
  quern::v1::TensorView view = Start(location);
  view.set_dtype("U8");
  view.set_rows(1);
  view.set_cols(location.info->bytes());
  view.set_col_stride(1);
  view.set_row_stride(static_cast<int64_t>(location.info->bytes()));
  return view;
}

void ShardWriter::Place(NewTensor tensor, quern::v1::OutputTensor* output) {
  output->set_name(tensor.name);
  output->set_dtype(std::string(DTypeName(tensor.dtype)));
  output->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  output->set_offset(end_);
  output->set_size(tensor.bytes);
  outputs_.push_back(output);
  tensors_.push_back({std::move(tensor.name), tensor.dtype, std::move(tensor.shape), end_, end_ + tensor.bytes});
  end_ += tensor.bytes;
}

void ShardWriter::PlaceAgain(quern::v1::OutputTensor* output) {
  *output = *outputs_.back();
  outputs_.push_back(output);
}

uint64_t ShardWriter::Finish() {
  quern::v1::WriteShard& work = *task_.mutable_write_shard();
  work.set_header(checkpoint::BuildSafetensorsHeader(tensors_));
  const uint64_t data_start = work.header().size();
  for (quern::v1::OutputTensor* output : outputs_) output->set_offset(data_start + output->offset());
  work.set_file_size(data_start + end_);
  task_.set_bytes_to_write(work.file_size());
  task_.set_minimum_memory(MinimumMemory(task_));
  return tensors_.size();
}

}  // namespace quern::daemon
