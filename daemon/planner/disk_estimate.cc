#include "daemon/planner/disk_estimate.h"

#include <algorithm>

#include "absl/strings/string_view.h"
#include "base/byte_size.h"
#include "base/task_memory.h"
#include "checkpoint/json_cursor.h"

namespace quern::daemon {
namespace {

// What the job store wants to find free when it opens.
constexpr uint64_t kJobStoreToOpen = 4 * kMiB;
// A record is written to the log and again to a table.
constexpr uint64_t kCopiesInJobStore = 2;
// Keys, digests, numbers of the longest form and punctuation of one entry.
constexpr uint64_t kIndexEntry = 8;
constexpr uint64_t kManifestModule = 640;
constexpr uint64_t kManifestStack = 128;
constexpr uint64_t kManifestCopy = 192;
constexpr uint64_t kManifestFile = 160;
constexpr uint64_t kRunSource = 384;
constexpr uint64_t kRunTask = 1536;  // grant and commit, with the names of worker, host and device
constexpr uint64_t kFixedParts = 4 * kKiB;

uint64_t Quoted(absl::string_view text) { return checkpoint::QuotedJsonSize(text); }

uint64_t IndexEntry(const quern::v1::OutputTensor& tensor, uint64_t quoted_shard) {
  return Quoted(tensor.name()) + quoted_shard + kIndexEntry;
}

uint64_t ManifestEntry(const quern::v1::ShardUnit& unit, const quern::v1::TaskSpec& task) {
  const auto file = [&](const quern::v1::TensorView& view) { return Quoted(task.source_files(static_cast<int>(view.file())).path()); };
  if (unit.has_copy()) {
    const quern::v1::CopyUnit& copy = unit.copy();
    return Quoted(copy.source().tensor()) + Quoted(copy.role()) + Quoted(copy.reason()) + Quoted(task.label()) + file(copy.source()) +
           kManifestCopy;
  }
  const quern::v1::QuantizeUnit& quantize = unit.quantize();
  const uint64_t stack = quantize.has_place() ? Quoted(quantize.outputs(0).name()) + kManifestStack : 0;
  return stack + Quoted(quantize.module()) + Quoted(quantize.role()) + Quoted(quantize.scheme()) + Quoted(quantize.reason()) +
         Quoted(task.label()) + Quoted(quantize.weight().tensor()) + file(quantize.weight()) + kManifestModule;
}

}  // namespace

uint64_t EstimateDiskBesideFiles(const Plan& plan, uint64_t config_bytes) {
  const quern::v1::PlanSummary& summary = plan.summary;
  const bool has_manifest = !summary.resolved_recipe().empty();
  // The new part of config.json may be indented anew.
  uint64_t bytes = kJobStoreToOpen + kFixedParts + config_bytes + 2 * summary.quantization_config().size();
  bytes += kCopiesInJobStore * summary.ByteSizeLong();
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    bytes += kCopiesInJobStore * task.ByteSizeLong();
    const uint64_t shard = Quoted(task.label());
    for (const quern::v1::ShardUnit& unit : task.write_shard().units()) {
      if (has_manifest) bytes += ManifestEntry(unit, task);
      if (plan.tasks.size() == 1) continue;  // one shard needs no index
      if (unit.has_copy()) bytes += IndexEntry(unit.copy().output(), shard);
      if (unit.has_generate()) bytes += IndexEntry(unit.generate().output(), shard);
      if (unit.quantize().place().offset() != 0) continue;  // the stack's first unit stands for it
      for (const quern::v1::OutputTensor& tensor : unit.quantize().outputs()) bytes += IndexEntry(tensor, shard);
    }
  }
  if (!has_manifest) return bytes;
  // In the manifest, run.json and a file of its own.
  bytes += 3 * Quoted(summary.resolved_recipe());
  for (const quern::v1::SourceFile& file : summary.source_files()) bytes += 2 * Quoted(file.path()) + kManifestFile + kRunSource;
  for (const quern::v1::TaskSpec& task : plan.tasks) bytes += Quoted(task.label()) + kManifestFile + kRunTask;
  for (const std::string& name : summary.side_files()) bytes += Quoted(name) + kManifestFile;
  return bytes;
}

uint64_t EstimateSpill(const Plan& plan, uint64_t memory) {
  constexpr uint64_t kAlignment = 64;
  uint64_t most = 0;
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    // The file of a module may live on while that of the next one begins.
    uint64_t largest = 0, second = 0;
    for (const quern::v1::ShardUnit& unit : task.write_shard().units()) {
      uint64_t size = 0;
      for (int i = 1; i < unit.quantize().outputs_size(); ++i) {
        size += (unit.quantize().outputs(i).size() + kAlignment - 1) / kAlignment * kAlignment;
      }
      if (size <= memory / kSideTensorShare) continue;
      second = std::max(second, std::min(largest, size));
      largest = std::max(largest, size);
    }
    most = std::max(most, largest + second);
  }
  return most;
}

}  // namespace quern::daemon
