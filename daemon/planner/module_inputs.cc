#include "daemon/planner/module_inputs.h"

#include <fcntl.h>

#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/fingerprint.h"
#include "daemon/planner/shape_text.h"

namespace quern::daemon {
namespace {

constexpr char kAmaxSuffix[] = ".input_amax";
constexpr char kActivationScales[] = "--activation-scales";
constexpr char kImportance[] = "--importance";
constexpr size_t kNamesShown = 5;
constexpr float kLargestE4m3 = 448;

// The first few.
std::string NamesOf(const std::set<std::string>& names) {
  std::vector<std::string> shown;
  for (const std::string& name : names) {
    if (shown.size() == kNamesShown) break;
    shown.push_back(name);
  }
  return absl::StrJoin(shown, ", ");
}

}  // namespace

absl::StatusOr<ModuleInputs::File> ModuleInputs::OpenOne(const std::string& path, bool with_fingerprints, quern::v1::PlanSummary& summary) {
  QUERN_ASSIGN_OR_RETURN(checkpoint::SafetensorsHeader header, checkpoint::ReadSafetensorsHeader(path));
  File file;
  QUERN_ASSIGN_OR_RETURN(file.fd, OpenFile(path, O_RDONLY));
  file.data_start = header.data_start;
  file.source.set_path(path);
  file.source.set_header_sha256(header.sha256);
  file.source.set_header_size(header.data_start);
  QUERN_ASSIGN_OR_RETURN(const uint64_t size, FileSize(path));
  file.source.set_size(size);
  if (with_fingerprints) {
    QUERN_ASSIGN_OR_RETURN(const checkpoint::FileFingerprint fingerprint, checkpoint::FingerprintFile(path, /*whole_content=*/true));
    if (fingerprint.size != size || fingerprint.header_sha256 != header.sha256) {
      return absl::AbortedError(absl::StrCat(path, " changed while it was planned from; run again when nothing writes to it"));
    }
    file.source.set_mtime_ns(fingerprint.mtime_ns);
    file.source.set_inode(fingerprint.inode);
    file.source.set_sample_digest(fingerprint.sample_digest);
    file.source.set_blob(fingerprint.blob);
    file.source.set_content_sha256(fingerprint.content_sha256);
  }
  for (checkpoint::TensorInfo& info : header.tensors) {
    std::string module(absl::StripSuffix(info.name, kAmaxSuffix));
    if (file.tensors.contains(module)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", module, " is there with and without \"", kAmaxSuffix, "\""));
    }
    file.unused.insert(module);
    file.tensors.emplace(std::move(module), std::move(info));
  }
  *summary.add_input_files() = file.source;
  return file;
}

absl::StatusOr<std::vector<float>> ModuleInputs::ReadFloats(const File& file, const checkpoint::TensorInfo& info) {
  // Files are little-endian, and so is every machine that this runs on.
  static_assert(std::endian::native == std::endian::little);
  std::vector<float> values(info.elements());
  QUERN_RETURN_IF_ERROR(
      ReadExactly(file.fd.get(), file.data_start + info.begin, values.data(), values.size() * sizeof(float), file.source.path()));
  return values;
}

absl::StatusOr<ModuleInputs> ModuleInputs::Open(const std::string& activation_scales, const std::string& importance, bool with_fingerprints,
                                                quern::v1::PlanSummary& summary) {
  ModuleInputs inputs;
  if (!activation_scales.empty()) {
    absl::StatusOr<File> file = OpenOne(activation_scales, with_fingerprints, summary);
    if (!file.ok()) return Annotate(file.status(), kActivationScales);
    inputs.activation_scales_ = *std::move(file);
  }
  if (!importance.empty()) {
    absl::StatusOr<File> file = OpenOne(importance, with_fingerprints, summary);
    if (!file.ok()) return Annotate(file.status(), kImportance);
    inputs.importance_ = *std::move(file);
  }
  return inputs;
}

absl::StatusOr<const checkpoint::TensorInfo*> ModuleInputs::Find(std::optional<File>& file, const char* option, const InputModule& module) {
  if (!file.has_value()) return absl::NotFoundError(absl::StrCat("there is no ", option, " FILE, which the scheme needs, for"));
  for (const std::string* name : {&module.name, &module.other_name}) {
    const auto found = file->tensors.find(*name);
    if (name->empty() || found == file->tensors.end()) continue;
    file->unused.erase(*name);
    return &found->second;
  }
  return absl::NotFoundError(absl::StrCat(option, " ", file->source.path(), " has no entry for"));
}

absl::Status ModuleInputs::AddTo(const InputModule& module, const quant::Scheme& scheme, quern::v1::TaskSpec& task,
                                 quern::v1::QuantizeUnit& unit) {
  if (scheme.NeedsActivationAmax()) {
    QUERN_ASSIGN_OR_RETURN(const checkpoint::TensorInfo* const info, Find(activation_scales_, kActivationScales, module));
    const std::string& path = activation_scales_->source.path();
    if (info->dtype != DType::kF32 || info->elements() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": ", info->name, " is ", DTypeName(info->dtype), " ", ShapeText(*info), "; an amax is one F32"));
    }
    QUERN_ASSIGN_OR_RETURN(const std::vector<float> values, ReadFloats(*activation_scales_, *info));
    const float amax = values[0];
    if (absl::Status status = scheme.CheckActivationAmax(module.dtype, amax); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", info->name, " is ", amax, ", ", status.message()));
    }
    // ModelOpt's scales, and those of NVFP4, are F32.
    const bool in_dtype =
        scheme.spec().activations == quant::Activations::kFp8Static && scheme.spec().convention == quant::Convention::kCompressedTensors;
    const float least = module.dtype == DType::kF16 ? 0x1p-14f : 0x1p-126f;
    if (in_dtype && amax < kLargestE4m3 * least) subnormal_.insert(module.name);
    unit.set_activation_amax(amax);
  }
  if (!scheme.NeedsImportance()) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(const checkpoint::TensorInfo* const info, Find(importance_, kImportance, module));
  const std::string& path = importance_->source.path();
  if (info->dtype != DType::kF32 || info->shape.size() != 1 || info->shape[0] != module.columns) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", info->name, " is ", DTypeName(info->dtype), " ", ShapeText(*info), "; ",
                                                   module.name, " has ", module.columns, " input channels in F32"));
  }
  QUERN_ASSIGN_OR_RETURN(const std::vector<float> values, ReadFloats(*importance_, *info));
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i]) && values[i] >= 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", info->name, ": the importance of column ", i, " is ", values[i],
                                                   "; each is a mean of squares, finite and not negative"));
  }
  int number = task.source_files_size();
  for (int i = 0; i < task.source_files_size(); ++i) {
    if (task.source_files(i).path() == path) number = i;
  }
  if (number == task.source_files_size()) *task.add_source_files() = importance_->source;
  quern::v1::DecodeInput& input = *unit.add_inputs();
  input.set_role("importance");
  quern::v1::TensorView& view = *input.mutable_view();
  view.set_file(static_cast<uint32_t>(number));
  view.set_tensor(info->name);
  view.set_dtype("F32");
  view.set_offset(importance_->data_start + info->begin);
  view.set_rows(1);
  view.set_cols(module.columns);
  view.set_col_stride(4);
  view.set_row_stride(static_cast<int64_t>(info->bytes()));
  return absl::OkStatus();
}

std::vector<std::string> ModuleInputs::Warnings() const {
  std::vector<std::string> warnings;
  for (const auto& [option, file] : {std::pair(kActivationScales, &activation_scales_), std::pair(kImportance, &importance_)}) {
    if (!file->has_value() || (*file)->unused.empty()) continue;
    const std::set<std::string>& unused = (*file)->unused;
    warnings.push_back(
        absl::StrCat(option, ": ", unused.size(), " entries are of no module that needs one, for example ", NamesOf(unused)));
  }
  if (!subnormal_.empty()) {
    warnings.push_back(absl::StrCat(kActivationScales, ": the scales of the inputs of ", subnormal_.size(),
                                    " modules are subnormal in the weights' dtype, with fewer digits the smaller they are (F16: below an "
                                    "amax of 0.0273), for example ",
                                    NamesOf(subnormal_)));
  }
  return warnings;
}

}  // namespace quern::daemon
