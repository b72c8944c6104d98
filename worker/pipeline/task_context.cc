#include "worker/pipeline/task_context.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/dtype.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "checkpoint/fingerprint.h"
#include "quant/scheme.h"

namespace quern::worker {
namespace {

// Reads and writes under way at once.
constexpr unsigned kRingDepth = 64;

absl::Status Changed(const quern::v1::SourceFile& file, absl::string_view what) {
  return WithFailure(absl::FailedPreconditionError(
                         absl::StrCat("source file ", file.path(), ": ", what, " since the job was planned; plan it again (--overwrite)")),
                     quern::v1::SOURCE_CHANGED);
}

// SHA-256 of the file's first `size` bytes; CANCELLED when the task is stopped meanwhile.
absl::StatusOr<std::string> HashBeginning(const SourceHandle& handle, uint64_t size, const TaskControl& control) {
  std::vector<char> buffer(std::min<uint64_t>(size, kMiB));
  Sha256 sha;
  for (uint64_t offset = 0; offset < size; offset += buffer.size()) {
    if (control.stop) return absl::CancelledError("the task was stopped");
    const uint64_t part = std::min<uint64_t>(buffer.size(), size - offset);
    QUERN_RETURN_IF_ERROR(ReadExactly(handle.fd.get(), offset, buffer.data(), part, handle.path));
    sha.Update(buffer.data(), part);
  }
  return sha.Finish();
}

absl::Status CheckHeader(const quern::v1::SourceFile& file, const SourceHandle& handle, const TaskControl& control) {
  if (file.header_sha256().empty()) return absl::OkStatus();
  if (file.header_size() > handle.size) return Changed(file, "it is shorter than its header");
  QUERN_ASSIGN_OR_RETURN(const std::string sha256, HashBeginning(handle, file.header_size(), control));
  return sha256 == file.header_sha256() ? absl::OkStatus() : Changed(file, "its header changed");
}

// Whether what may be a copy of the planned file has its bytes: all of them where the plan has their digest, else the planned samples.
// `how`: why it may be a copy.
absl::Status CheckContent(const quern::v1::SourceFile& file, const SourceHandle& handle, absl::string_view how,
                          const TaskControl& control) {
  const absl::Status other = Changed(file, absl::StrCat(how, ", and its content is another one"));
  if (!file.content_sha256().empty()) {
    QUERN_ASSIGN_OR_RETURN(const std::string sha256, HashBeginning(handle, handle.size, control));
    return sha256 == file.content_sha256() ? absl::OkStatus() : other;
  }
  if (file.sample_digest().empty()) return Changed(file, how);
  constexpr uint64_t kSampleSize = 4096;
  std::string samples;
  for (const uint64_t offset : checkpoint::SampleOffsets(handle.size)) {
    char sample[kSampleSize];
    const uint64_t size = std::min(kSampleSize, handle.size - offset);
    QUERN_RETURN_IF_ERROR(ReadExactly(handle.fd.get(), offset, sample, size, handle.path));
    samples.append(sample, size);
  }
  return Xxh3_128Of(samples) == file.sample_digest() ? absl::OkStatus() : other;
}

// Whether a view is likely to be gathered: its elements do not follow each other, or its rows are far apart.
bool Gathers(const quern::v1::TensorView& view, int64_t element_size) {
  return view.decode_scheme().empty() &&
         (view.col_stride() != element_size || view.row_stride() / 2 / element_size > static_cast<int64_t>(view.cols()));
}

// Whether a weight goes into a stack otherwise than row by row.
bool IsTurned(const quern::v1::QuantizeUnit& unit) {
  const absl::StatusOr<DType> dtype = ParseDType(unit.outputs(0).dtype());
  return dtype.ok() && BitsPerElement(*dtype) % 8 == 0 && unit.place().col_stride() != BytesPerElement(*dtype);
}

// Which parts of the pool the units of a task use. Units that are not valid need nothing: they are refused when their turn comes.
class NeedsOfUnits {
 public:
  void Add(const quern::v1::QuantizeUnit& unit) {
    const absl::StatusOr<DType> dtype = ParseDType(unit.weight().dtype());
    if (!dtype.ok()) return;
    for (const quern::v1::TensorView& view : unit.statistics_set()) needs_.slabs |= Gathers(view, BytesPerElement(*dtype));
    needs_.slabs |= Gathers(unit.weight(), BytesPerElement(*dtype));
    if (unit.has_place() && unit.outputs_size() == 1) needs_.slabs |= IsTurned(unit);
    const quant::Scheme* const scheme = Find(unit.scheme());
    if (scheme == nullptr) return;
    const auto rows = static_cast<int64_t>(std::min<uint64_t>(unit.weight().rows(), INT64_MAX));
    const auto cols = static_cast<int64_t>(std::min<uint64_t>(unit.weight().cols(), INT64_MAX));
    needs_.sets |= scheme->NeedsStatistics({rows, cols}, {std::min(rows, scheme->RowMultiple()), cols});
  }
  PoolLayout::Needs needs() const { return needs_; }

 private:
  const quant::Scheme* Find(const std::string& text) {
    const auto [entry, added] = schemes_.try_emplace(text, nullptr);
    if (!added) return entry->second;
    const absl::StatusOr<quant::SchemeSpec> spec = quant::SchemeSpec::Parse(text);
    if (spec.ok()) entry->second = quant::Scheme::For(*spec).value_or(nullptr);
    return entry->second;
  }

  PoolLayout::Needs needs_;
  std::map<std::string, const quant::Scheme*> schemes_;
};

PoolLayout::Needs NeedsOf(const quern::v1::TaskSpec& spec) {
  NeedsOfUnits of_units;
  for (const quern::v1::ShardUnit& unit : spec.write_shard().units()) {
    if (unit.has_quantize()) of_units.Add(unit.quantize());
  }
  for (const quern::v1::CompareUnit& unit : spec.compare_shard().units()) {
    if (unit.has_quantize()) of_units.Add(unit.quantize());
  }
  PoolLayout::Needs needs = of_units.needs();
  needs.output = spec.has_write_shard();
  needs.minimum = spec.minimum_memory();
  return needs;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TaskContext>> TaskContext::Create(const quern::v1::TaskSpec& spec, const TaskOptions& options,
                                                                 TaskControl* control) {
  const uint64_t needed = std::max(kMinimumTaskMemory, spec.minimum_memory());
  if (options.memory < needed) {
    return WithFailure(absl::ResourceExhaustedError(absl::StrCat("the task needs a buffer pool of ", FormatLeastMemory(needed), ", not ",
                                                                 FormatByteSize(options.memory), ": give the worker more --memory")),
                       quern::v1::MEMORY_TOO_SMALL, needed);
  }
  std::unique_ptr<TaskContext> context(new TaskContext(spec, options, control));
  QUERN_RETURN_IF_ERROR(context->Start());
  return context;
}

absl::Status TaskContext::Start() {
  began_ = Clock::Real()->Monotonic();
  if (!options_.output_path.empty()) {
    QUERN_ASSIGN_OR_RETURN(output_tree_, LinklessTree::Open(options_.output_root, DirName(options_.output_path)));
  }
  if (absl::StatusOr<std::unique_ptr<Uring>> uring = Uring::Create(kRingDepth); uring.ok()) {
    uring_ = *std::move(uring);
  } else if (options_.reader == ReaderMode::kDirect) {
    return absl::FailedPreconditionError(
        absl::StrCat("io_uring is refused here, use --reader auto: ", std::string(uring.status().message())));
  }
  for (const quern::v1::SourceFile& file : spec_.source_files()) QUERN_RETURN_IF_ERROR(AddSource(file));
  QUERN_ASSIGN_OR_RETURN(pool_, BufferPool::Create(PoolLayout::For(options_.memory, NeedsOf(spec_))));
  const PoolLayout& layout = pool_->layout();
  input_ = std::make_unique<BufferRing>(pool_->input(), layout.input);
  held_ = std::make_unique<BufferRing>(pool_->held(), layout.held);
  slabs_ = std::make_unique<BufferRing>(pool_->slabs(), layout.slabs);
  sets_ = std::make_unique<BufferRing>(pool_->sets(), layout.sets);
  // Pinning touches every page: only where the task would, too. Without it operations pin as they go.
  if (uring_ != nullptr && spec_.bytes_to_read() + spec_.bytes_to_write() > 4 * layout.total()) {
    if (spec_.bytes_to_read() > layout.input) uring_->Register(pool_->input(), layout.input);
    if (spec_.bytes_to_write() > layout.output && layout.output > 0) uring_->Register(pool_->output(), layout.output);
  }
  QUERN_ASSIGN_OR_RETURN(reader_, NewSourceReader(options_.reader, uring_.get()));
  if (options_.fetcher != nullptr) reader_ = NewFetchingReader(std::move(reader_), options_.fetcher);
  engine_ = std::make_unique<Engine>(reader_.get(), input_.get(), std::max(options_.threads, 1), control_);
  return absl::OkStatus();
}

TaskContext::~TaskContext() {
  // The engine's threads use the output, and the output reports its errors to the engine.
  if (engine_ != nullptr) engine_->Stop();
  output_.reset();
}

absl::Status TaskContext::CreateOutput(uint64_t size) {
  OutputFile::Options options;
  options.path = options_.output_path;
  options.size = size;
  options.pool = pool_.get();
  options.uring = uring_.get();
  options.sink = options_.sink;
  options.bytes_written = &control_->bytes_written;
  options.on_error = [engine = engine_.get()](absl::Status status) { engine->Fail(std::move(status)); };
  QUERN_ASSIGN_OR_RETURN(output_, OutputFile::Create(std::move(options)));
  return absl::OkStatus();
}

absl::Status TaskContext::Reserve(uint64_t size) {
  return engine_->WaitUntil([&](absl::Duration timeout) { return output_->Reserve(size, timeout); });
}

absl::StatusOr<std::unique_ptr<SpillFile>> TaskContext::CreateSpill(uint64_t size) const {
  if (options_.sink == nullptr) return SpillFile::Create(absl::StrCat(options_.output_path, ".spill"), size, nullptr);
  const std::string path = JoinPath(options_.spool, absl::StrCat("quern-spill-", getpid(), "-", reinterpret_cast<uintptr_t>(this)));
  // The job's own disk has room: it is this worker that cannot do the task.
  return SpillFile::Create(path, size, [size, spool = options_.spool](const absl::Status& full) {
    return WithFailure(absl::ResourceExhaustedError(absl::StrCat("the directory of --spool, ", spool, ", has no room for the ", size,
                                                                 " bytes that the task keeps there: ", full.message())),
                       quern::v1::IO_ERROR, size);
  });
}

absl::StatusOr<SourceHandle> TaskContext::OpenHere(const std::string& path) const {
  const bool direct = uring_ != nullptr && (options_.reader == ReaderMode::kAuto || options_.reader == ReaderMode::kDirect);
  return OpenSource(options_.paths.Apply(path), direct, options_.reader == ReaderMode::kDirect);
}

absl::StatusOr<SourceHandle> TaskContext::Open(const std::string& path) const {
  if (!options_.fetch_source) {
    absl::StatusOr<SourceHandle> here = OpenHere(path);
    // A worker may see most of the files: those beside the checkpoint may be elsewhere.
    if (options_.fetcher == nullptr || !absl::IsNotFound(here.status())) return here;
  }
  QUERN_ASSIGN_OR_RETURN(const std::vector<uint64_t> sizes, options_.fetcher->Check({path}, /*headers=*/true));
  SourceHandle handle;
  handle.path = path;
  handle.size = sizes[0];
  handle.fetched = true;
  return handle;
}

absl::StatusOr<TaskContext::Identity> TaskContext::IdentityOf(const SourceHandle& handle) {
  if (handle.fetched) return Identity();
  struct stat info;
  if (fstat(handle.fd.get(), &info) != 0) return ErrnoToStatus(errno, "stat", handle.path);
  return Identity{static_cast<uint64_t>(info.st_size), int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec, info.st_ino};
}

absl::Status TaskContext::AddSource(const quern::v1::SourceFile& file) {
  QUERN_ASSIGN_OR_RETURN(SourceHandle handle, Open(file.path()));
  QUERN_ASSIGN_OR_RETURN(const Identity identity, IdentityOf(handle));
  if (handle.size != file.size()) return Changed(file, absl::StrCat("its size changed from ", file.size(), " to ", handle.size));
  if (!handle.fetched) {
    QUERN_RETURN_IF_ERROR(CheckHeader(file, handle, *control_));
    std::string how;
    if (file.mtime_ns() != 0 && identity.mtime_ns != file.mtime_ns()) {
      how = "it was modified";
    } else if (file.inode() != 0 && identity.inode != file.inode()) {
      how = "it was replaced";
    }
    // Time and number of a file prove little on another filesystem.
    const std::string here = options_.paths.Apply(file.path());
    if (here != file.path() && (!how.empty() || !file.content_sha256().empty())) {
      how = absl::StrCat(how.empty() ? "it" : how, how.empty() ? " is " : " or is ", here, " on this worker");
    }
    if (!how.empty()) QUERN_RETURN_IF_ERROR(CheckContent(file, handle, how, *control_));
  }
  sources_.push_back(std::move(handle));
  identities_.push_back(identity);
  return absl::OkStatus();
}

absl::Status TaskContext::CheckSourcesAgain() const {
  std::vector<std::string> fetched;
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].fetched) {
      fetched.push_back(sources_[i].path);
      continue;
    }
    QUERN_ASSIGN_OR_RETURN(const Identity identity, IdentityOf(sources_[i]));
    if (identity != identities_[i]) return Changed(spec_.source_files(static_cast<int>(i)), "it was modified");
  }
  if (fetched.empty()) return absl::OkStatus();
  return options_.fetcher->Check(fetched, /*headers=*/false).status();
}

void TaskContext::FillResult(quern::v1::TaskResult* result) const {
  result->set_bytes_read(control_->bytes_read);
  result->set_bytes_written(control_->bytes_written);
  result->set_kernel_target(quant::KernelTarget());
  result->set_reader(std::string(reader_->name()));
  rusage usage = {};
  if (getrusage(RUSAGE_SELF, &usage) == 0) result->set_peak_rss(static_cast<uint64_t>(usage.ru_maxrss) * kKiB);
  quern::v1::StageTimes* times = result->mutable_times();
  const Engine::Times engine = engine_->times();
  times->set_read_seconds(engine.read_seconds);
  times->set_compute_seconds(engine.compute_seconds);
  times->set_read_stall_seconds(engine.read_stall_seconds);
  times->set_compute_stall_seconds(engine.compute_stall_seconds);
  if (output_ != nullptr) {
    const OutputFile::Times output = output_->times();
    times->set_write_seconds(output.write_seconds);
    times->set_hash_seconds(output.hash_seconds);
    times->set_write_stall_seconds(output.stall_seconds);
  }
  times->set_wall_seconds(absl::ToDoubleSeconds(Clock::Real()->Monotonic() - began_));
}

uint64_t TaskContext::largest_tile() const { return RoundDown(layout().input / 4, kIoBlock); }
uint64_t TaskContext::preferred_tile() const {
  // Every thread has one tile, and as many are being read; large reads are good for the disk.
  const uint64_t tiles = std::max<uint64_t>(8, 2 * static_cast<uint64_t>(std::max(options_.threads, 1)) + 4);
  return std::max(RoundDown(std::min(layout().input / tiles, 4 * kMiB), kIoBlock), 16 * kIoBlock);
}

}  // namespace quern::worker
