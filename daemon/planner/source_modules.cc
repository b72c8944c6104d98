#include "daemon/planner/source_modules.h"

#include <fcntl.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/expert_stack.h"
#include "daemon/planner/shape_text.h"
#include "daemon/planner/shard_writer.h"
#include "daemon/planner/stored_format.h"

namespace quern::daemon {
namespace {

using checkpoint::ExpertStack;
using checkpoint::IsStorageParameter;
using checkpoint::TensorInfo;
using quant::ScaleType;
using quant::SchemeSpec;
using quant::Strategy;

constexpr uint64_t kBlock = 128;   // of FP8 in blocks
constexpr uint64_t kMxGroup = 32;  // of MXFP4 and MXFP8
constexpr uint64_t kNvfp4Group = 16;
constexpr absl::string_view kFp8Scales[] = {"weight_scale_inv", "weight_scale", "scale"};

// Beside a plain weight these may be parameters of the model: learned scales, and scales of a cache under their old name.
bool IsStrayBesidePlain(absl::string_view parameter) {
  return IsStorageParameter(parameter) && parameter != "scale" && parameter != "output_scale" && parameter != "pre_quant_scale";
}

uint64_t Blocks(uint64_t n) { return (n + kBlock - 1) / kBlock; }

// Parameters of formats that cannot be read.
bool IsForeignParameter(absl::string_view parameter) { return parameter == "qweight" || parameter == "qzeros" || parameter == "scales"; }

// Of weights in a quantized format. Tables of other integers are none.
bool IsCodeDType(DType dtype) { return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2 || dtype == DType::kI8 || dtype == DType::kU8; }
// No element of these stands for itself.
bool IsSmallFloat(DType dtype) {
  return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2 || dtype == DType::kF8E4M3Fnuz || dtype == DType::kF8E5M2Fnuz ||
         dtype == DType::kF4 || dtype == DType::kF6E2M3 || dtype == DType::kF6E3M2;
}
bool IsPlainDType(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32 || dtype == DType::kF64; }
bool IsScaleFloat(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32; }
bool IsByteExponent(DType dtype) { return dtype == DType::kU8 || dtype == DType::kF8E8M0; }

SchemeSpec FloatSpec(int bits, Strategy strategy, int64_t group_size, ScaleType scale) {
  SchemeSpec spec;
  spec.num_bits = bits;
  spec.type = quant::NumberType::kFloat;
  spec.strategy = strategy;
  spec.group_size = group_size;
  spec.scale = scale;
  return spec;
}

absl::Status Unreadable(absl::string_view why) { return absl::InvalidArgumentError(why); }

class Gatherer {
 public:
  explicit Gatherer(const checkpoint::Checkpoint& checkpoint)
      : checkpoint_(checkpoint), family_(checkpoint::Family::For(checkpoint.config())), files_(checkpoint.shards().size()) {}

  absl::StatusOr<SourceModules> Run() {
    QUERN_ASSIGN_OR_RETURN(format_, StoredFormat::Parse(checkpoint_.config()));
    Group();
    for (size_t m = 0; m < parts_.size(); ++m) {
      QUERN_RETURN_IF_ERROR(Resolve(m));
    }
    CutStacks();
    MarkStrangeCodes();
    return std::move(result_);
  }

 private:
  // The tensors of a module by what they are.
  using Parts = std::vector<std::pair<std::string, size_t>>;

  const TensorInfo& Info(size_t tensor) const { return *checkpoint_.tensors()[tensor].info; }
  std::vector<SourceModule>& modules() { return result_.modules; }

  void Group() {
    const auto& tensors = checkpoint_.tensors();
    by_name_.reserve(tensors.size());
    modules().reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      checkpoint::ModuleIdentity identity = family_.Identify(tensors[i].info->name, checkpoint_.config());
      const auto [entry, added] = by_name_.try_emplace(identity.module, modules().size());
      if (added) {
        modules().emplace_back();
        parts_.emplace_back();
      }
      parts_[entry->second].emplace_back(identity.parameter, i);
      if (added || identity.parameter == "weight") modules()[entry->second].identity = std::move(identity);
    }
  }

  const size_t* Find(const Parts& parts, absl::string_view parameter) const {
    for (const auto& [name, tensor] : parts) {
      if (name == parameter) return &tensor;
    }
    return nullptr;
  }

  absl::Status Resolve(size_t m) {
    SourceModule& module = modules()[m];
    const Parts& parts = parts_[m];
    if (ResolveStack(m)) return absl::OkStatus();
    absl::StatusOr<std::optional<SourceWeight>> weight = FindWeight(module.identity, parts);
    if (!weight.ok()) {
      if (!absl::IsInvalidArgument(weight.status())) return weight.status();
      module.unreadable = std::string(weight.status().message());
    } else {
      module.weight = *std::move(weight);
    }
    for (const auto& [parameter, tensor] : parts) {
      module.described = module.described || IsStorageParameter(parameter) || IsForeignParameter(parameter) ||
                         (parameter == "weight" && IsCodeDType(Info(tensor).dtype));
    }
    const bool decoded = module.weight.has_value() && module.weight->decoder != nullptr;
    const size_t* const own = Find(parts, "weight");
    const bool plain = !decoded && module.unreadable.empty() && own != nullptr && IsPlainDType(Info(*own).dtype);
    for (const auto& [parameter, tensor] : parts) {
      const bool of_weight =
          module.weight.has_value() && (decoded ? std::any_of(module.weight->regions.begin(), module.weight->regions.end(),
                                                              [t = tensor](const SourceRegion& r) { return r.tensor == t; })
                                                : tensor == module.weight->tensor);
      if (decoded && (of_weight || IsStorageParameter(parameter))) {
        if (tensor != module.weight->tensor) module.storage.push_back(tensor);
      } else if (plain && IsStrayBesidePlain(parameter)) {
        result_.strays.push_back(tensor);
      } else if (!of_weight) {
        module.tensors.push_back(tensor);
      }
    }
    return absl::OkStatus();
  }

  // ---- Weights that are tensors of their own.

  absl::StatusOr<std::optional<SourceWeight>> FindWeight(const checkpoint::ModuleIdentity& identity, const Parts& parts) {
    std::optional<SourceWeight> none;
    for (const auto& [parameter, tensor] : parts) {
      if (IsForeignParameter(parameter)) {
        return Unreadable(absl::StrCat("tensors named .", parameter, " (GPTQ, AWQ and their kin) are of a format that cannot be read"));
      }
    }
    if (Find(parts, "pre_quant_scale") != nullptr) {
      return Unreadable("its inputs are scaled (pre_quant_scale, as ModelOpt's AWQ does), which plain weights cannot say");
    }
    if (const size_t* packed = Find(parts, "weight_packed")) {
      if (Find(parts, "weight") != nullptr) return Unreadable("it has a weight and a weight_packed, and nothing says which one counts");
      if (Find(parts, "weight_g_idx") != nullptr) return Unreadable("its columns are permuted (weight_g_idx), which cannot be read");
      return Info(*packed).dtype == DType::kI32 ? Packed(identity, parts, *packed) : PackedFloats(parts, *packed);
    }
    const size_t* const weight = Find(parts, "weight");
    if (weight == nullptr) return none;
    const TensorInfo& info = Info(*weight);
    const bool codes = IsCodeDType(info.dtype) && std::any_of(parts.begin(), parts.end(), [](const auto& part) {
                         return checkpoint::IsBitsandbytesParameter(part.first);
                       });
    if (codes) return Unreadable("it is in a format of bitsandbytes, which cannot be read");
    if (info.shape.size() != 2) return none;
    if (IsPlainDType(info.dtype) || info.elements() == 0) return std::optional<SourceWeight>(Plain(*weight));
    switch (info.dtype) {
      case DType::kF8E4M3:
        return Fp8(identity, parts, *weight);
      case DType::kU8:
        if (Find(parts, "weight_scale_2") != nullptr) return ModelOptFp4(parts, *weight);
        if (const size_t* scale = Find(parts, "weight_scale"); scale != nullptr && Info(*scale).dtype == DType::kF8E4M3) {
          return Unreadable("it is ModelOpt's NVFP4 (U8 with a weight_scale in F8_E4M3) without its weight_scale_2");
        }
        break;
      case DType::kI8:
        if (const size_t* scale = Find(parts, "scale"); scale != nullptr && IsByteExponent(Info(*scale).dtype)) {
          return Match(FloatSpec(4, Strategy::kGroup, kMxGroup, ScaleType::kE8m0), DType::kBF16, info.shape[0], info.shape[1] * 2,
                       {{"weight_packed", *weight}, {"weight_scale", *scale}});
        }
        if (Find(parts, "weight_scale") != nullptr) return Integers(identity, parts, *weight);
        break;
      default:
        break;
    }
    return Unreadable(absl::StrCat("it is ", DTypeName(info.dtype), " ", ShapeText(info), " without a scale that says what it means"));
  }

  SourceWeight Plain(size_t tensor) const {
    const TensorInfo& info = Info(tensor);
    SourceWeight weight;
    weight.dtype = info.dtype;
    weight.rows = info.shape[0];
    weight.cols = info.shape[1];
    weight.tensor = tensor;
    // Of an empty one that is less than a byte nothing is read.
    weight.col_stride = BitsPerElement(info.dtype) % 8 == 0 ? static_cast<uint64_t>(BytesPerElement(info.dtype)) : 1;
    weight.row_stride = weight.cols * weight.col_stride;
    return weight;
  }

  // The weight as the regions of `spec`, with the tensors that hold them.
  absl::StatusOr<std::optional<SourceWeight>> Match(const SchemeSpec& spec, DType dtype, uint64_t rows, uint64_t cols,
                                                    const std::vector<std::pair<absl::string_view, size_t>>& tensors) {
    QUERN_ASSIGN_OR_RETURN(const quant::Scheme* const scheme, quant::Scheme::For(spec));
    SourceWeight weight;
    weight.dtype = dtype;
    weight.rows = rows;
    weight.cols = cols;
    weight.decoder = scheme;
    QUERN_ASSIGN_OR_RETURN(const std::vector<quant::Region> regions,
                           scheme->Regions(dtype, {static_cast<int64_t>(rows), static_cast<int64_t>(cols)}));
    for (const quant::Region& region : regions) {
      if (!region.constant.empty()) continue;
      const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& entry) { return entry.first == region.suffix; });
      if (found == tensors.end()) return Unreadable(absl::StrCat("it has no ", region.suffix));
      const TensorInfo& info = Info(found->second);
      const uint64_t bytes = TensorBytes(region.dtype, region.shape);
      if (!SameElements(info.dtype, region.dtype) || !FitsShape(spec, info.shape, region.shape)) {
        return Unreadable(absl::StrCat(info.name, " is ", DTypeName(info.dtype), " ", ShapeText(info), ", but ", DTypeName(region.dtype),
                                       " [", absl::StrJoin(region.shape, ", "), "] is expected for a weight of [", rows, ", ", cols, "]"));
      }
      SourceRegion source{region.suffix, found->second, 0, 1, bytes, bytes};
      if (region.bytes_per_row > 0) {
        source.row_bytes = source.row_stride = static_cast<uint64_t>(region.bytes_per_row);
        source.rows = bytes / source.row_bytes;
      }
      weight.regions.push_back(std::move(source));
    }
    weight.tensor = weight.regions.front().tensor;
    return std::optional<SourceWeight>(std::move(weight));
  }

  // The same bits under two names.
  static bool SameElements(DType stored, DType wanted) {
    if (stored == wanted) return true;
    const auto is_byte = [](DType dtype) { return dtype == DType::kU8 || dtype == DType::kI8 || dtype == DType::kF8E8M0; };
    return is_byte(stored) && is_byte(wanted);
  }

  // compressed-tensors multiplies by a scale as it is shaped: one for all fits in any shape, [out] would go along the columns. What others
  // wrote with a scale a row is FP8, and their readers take [out] too.
  bool FitsShape(const SchemeSpec& spec, std::vector<uint64_t> stored, std::vector<uint64_t> wanted) const {
    const auto of_all = [](const std::vector<uint64_t>& shape) {
      return std::all_of(shape.begin(), shape.end(), [](uint64_t n) { return n == 1; });
    };
    if (stored == wanted || (of_all(stored) && of_all(wanted))) return true;
    const bool by_row = spec.type == quant::NumberType::kFloat && spec.strategy == Strategy::kChannel;
    if (!by_row || format_.method() == "compressed-tensors") return false;
    for (std::vector<uint64_t>* shape : {&stored, &wanted}) {
      if (shape->size() == 2 && shape->back() == 1) shape->pop_back();
    }
    return stored == wanted;
  }

  absl::StatusOr<std::optional<SourceWeight>> Packed(const checkpoint::ModuleIdentity& identity, const Parts& parts, size_t packed) {
    const size_t* const scale = Find(parts, "weight_scale");
    if (scale == nullptr) return Unreadable("it has no weight_scale");
    const SchemeSpec* const known = format_.IntegersOf(identity);
    if (known == nullptr) return Unreadable("no group of config.json's quantization_config says how many bits its integers have");
    SchemeSpec spec = *known;
    const TensorInfo& info = Info(packed);
    const TensorInfo& scales = Info(*scale);
    if (info.shape.size() != 2 || !IsScaleFloat(scales.dtype))
      return Unreadable(absl::StrCat("weight_packed ", ShapeText(info), " with a weight_scale in ", DTypeName(scales.dtype)));
    uint64_t cols = 0;
    const size_t* const shape = Find(parts, "weight_shape");
    std::optional<std::pair<uint64_t, uint64_t>> sides;
    if (shape != nullptr) {
      QUERN_ASSIGN_OR_RETURN(sides, ReadShape(*shape, info));
    }
    if (spec.strategy == Strategy::kGroup && scales.shape.size() == 2 && scales.shape[1] <= UINT64_MAX / spec.group_size) {
      cols = scales.shape[1] * static_cast<uint64_t>(spec.group_size);
      if (sides.has_value() && sides->second != cols) {
        return Unreadable(absl::StrCat("its weight_shape says [", sides->first, ", ", sides->second, "], but weight_scale ",
                                       ShapeText(scales), " in groups of ", spec.group_size, " is of ", cols, " columns"));
      }
    } else {
      if (shape == nullptr) return Unreadable("it has no weight_shape");
      cols = sides->second;
    }
    std::vector<std::pair<absl::string_view, size_t>> tensors = {{"weight_packed", packed}, {"weight_scale", *scale}};
    if (const size_t* zero_point = Find(parts, "weight_zero_point")) tensors.emplace_back("weight_zero_point", *zero_point);
    if (spec.symmetric && tensors.size() > 2) return Unreadable("it has zero points, but quantization_config says that it is symmetric");
    return Match(spec, scales.dtype, info.shape[0], cols, tensors);
  }

  // The two numbers in a weight_shape.
  absl::StatusOr<std::pair<uint64_t, uint64_t>> ReadShape(size_t tensor, const TensorInfo& packed) {
    const checkpoint::TensorLocation& location = checkpoint_.tensors()[tensor];
    const checkpoint::Shard& shard = checkpoint_.shards()[location.shard];
    const DType dtype = location.info->dtype;
    const int width = dtype == DType::kI64 ? 8 : 4;
    if (location.info->elements() != 2 || (dtype != DType::kI64 && dtype != DType::kI32)) {
      return Unreadable(absl::StrCat("its weight_shape is ", DTypeName(dtype), " ", ShapeText(*location.info), ", not I64 [2]"));
    }
    UniqueFd& file = files_[location.shard];
    if (!file) {
      QUERN_ASSIGN_OR_RETURN(file, OpenFile(shard.path, O_RDONLY));
    }
    unsigned char bytes[16];
    const uint64_t offset = shard.header.data_start + location.info->begin;
    QUERN_RETURN_IF_ERROR(ReadExactly(file.get(), offset, bytes, location.info->bytes(), shard.path));
    uint64_t sides[2] = {0, 0};
    for (int i = 0; i < 2 * width; ++i) sides[i / width] |= uint64_t{bytes[i]} << (8 * (i % width));
    const auto number = [&](uint64_t side) { return width == 8 ? static_cast<int64_t>(side) : static_cast<int32_t>(side); };
    if (sides[0] != packed.shape[0] || sides[1] == 0 || sides[1] > packed.shape[1] * 32) {
      return Unreadable(absl::StrCat("its weight_shape says [", number(sides[0]), ", ", number(sides[1]), "], which weight_packed ",
                                     ShapeText(packed), " cannot hold"));
    }
    return std::pair(sides[0], sides[1]);
  }

  absl::StatusOr<std::optional<SourceWeight>> Integers(const checkpoint::ModuleIdentity& identity, const Parts& parts, size_t weight) {
    const size_t* const scale = Find(parts, "weight_scale");
    if (Find(parts, "weight_g_idx") != nullptr) return Unreadable("its columns are permuted (weight_g_idx), which cannot be read");
    const SchemeSpec* const known = format_.IntegersOf(identity);
    if (known == nullptr) return Unreadable("no group of config.json's quantization_config says what its integers are");
    SchemeSpec spec = *known;
    // One byte an element, whatever the activations were to be.
    spec.activations = quant::Activations::kInt8Token;
    if (!IsScaleFloat(Info(*scale).dtype)) return Unreadable(absl::StrCat("its weight_scale is ", DTypeName(Info(*scale).dtype)));
    std::vector<std::pair<absl::string_view, size_t>> tensors = {{"weight", weight}, {"weight_scale", *scale}};
    if (const size_t* zero_point = Find(parts, "weight_zero_point")) tensors.emplace_back("weight_zero_point", *zero_point);
    const TensorInfo& info = Info(weight);
    return Match(spec, Info(*scale).dtype, info.shape[0], info.shape[1], tensors);
  }

  absl::StatusOr<std::optional<SourceWeight>> PackedFloats(const Parts& parts, size_t packed) {
    const TensorInfo& info = Info(packed);
    const size_t* const scale = Find(parts, "weight_scale");
    if (scale == nullptr || info.shape.size() != 2 || info.dtype != DType::kU8) {
      return Unreadable(
          absl::StrCat("weight_packed is ", DTypeName(info.dtype), " ", ShapeText(info), scale == nullptr ? " without weight_scale" : ""));
    }
    if (const size_t* global = Find(parts, "weight_global_scale")) {
      return Match(FloatSpec(4, Strategy::kTensorGroup, kNvfp4Group, ScaleType::kE4m3), DType::kBF16, info.shape[0], info.shape[1] * 2,
                   {{"weight_packed", packed}, {"weight_scale", *scale}, {"weight_global_scale", *global}});
    }
    if (Info(*scale).dtype == DType::kF8E4M3) return Unreadable("it is NVFP4 (weight_scale is F8_E4M3) without its weight_global_scale");
    return Match(FloatSpec(4, Strategy::kGroup, kMxGroup, ScaleType::kE8m0), DType::kBF16, info.shape[0], info.shape[1] * 2,
                 {{"weight_packed", packed}, {"weight_scale", *scale}});
  }

  absl::StatusOr<std::optional<SourceWeight>> ModelOptFp4(const Parts& parts, size_t weight) {
    const size_t* const scale = Find(parts, "weight_scale");
    const size_t* const scale_2 = Find(parts, "weight_scale_2");
    if (scale == nullptr) return Unreadable("it has weight_scale_2 and no weight_scale");
    SchemeSpec spec = FloatSpec(4, Strategy::kTensorGroup, kNvfp4Group, ScaleType::kE4m3);
    spec.convention = quant::Convention::kModelOpt;
    const TensorInfo& info = Info(weight);
    return Match(spec, DType::kBF16, info.shape[0], info.shape[1] * 2,
                 {{"weight", weight}, {"weight_scale", *scale}, {"weight_scale_2", *scale_2}});
  }

  // The scheme of FP8 weights [rows, cols] whose scales have this dtype and shape, and the dtype that they decode to.
  absl::StatusOr<std::pair<SchemeSpec, DType>> Fp8Scheme(uint64_t rows, uint64_t cols, DType dtype,
                                                         const std::vector<uint64_t>& shape) const {
    uint64_t elements = 1;
    for (uint64_t dimension : shape) elements *= dimension;
    const bool is_block = shape.size() == 2 && shape[0] == Blocks(rows) && shape[1] == Blocks(cols);
    const bool is_group = shape.size() == 2 && shape[0] == rows && cols % kMxGroup == 0 && shape[1] == cols / kMxGroup;
    const bool is_channel = (shape.size() == 1 && shape[0] == rows) || (shape.size() == 2 && shape[0] == rows && shape[1] == 1);
    if (IsByteExponent(dtype)) {
      if (is_block && !(is_group && dtype == DType::kU8))
        return std::pair(FloatSpec(8, Strategy::kBlock, kBlock, ScaleType::kE8m0), DType::kBF16);
      if (is_group) return std::pair(FloatSpec(8, Strategy::kGroup, kMxGroup, ScaleType::kE8m0), DType::kBF16);
    }
    if (IsScaleFloat(dtype)) {
      // Scales that compressed-tensors wrote have the dtype of the weights; others are F32, BF16 or F16 beside BF16 weights.
      const bool own = format_.method() == "compressed-tensors";
      const ScaleType scale = own                     ? ScaleType::kWeight
                              : dtype == DType::kBF16 ? ScaleType::kBf16
                              : dtype == DType::kF16  ? ScaleType::kF16
                                                      : ScaleType::kF32;
      const DType decoded = own || dtype == DType::kF16 ? dtype : DType::kBF16;
      if (elements == 1 || is_channel) {
        SchemeSpec spec = FloatSpec(8, elements == 1 ? Strategy::kTensor : Strategy::kChannel, 0, scale);
        // ModelOpt rounds its scales to the dtype of the weight before it multiplies.
        if (scale == ScaleType::kF32 && format_.method() == "modelopt") spec.convention = quant::Convention::kModelOpt;
        return std::pair(spec, decoded);
      }
      if (is_block) return std::pair(FloatSpec(8, Strategy::kBlock, kBlock, scale), decoded);
    }
    return Unreadable(absl::StrCat("FP8 [", rows, ", ", cols, "] with scales ", DTypeName(dtype), " [", absl::StrJoin(shape, ", "),
                                   "]: neither one for all, nor one a row, nor one a block of 128 x 128"));
  }

  // Scales of so many blocks fit blocks of another size, too: INVALID_ARGUMENT where the config says that these are no blocks of 128 x 128.
  absl::Status CheckBlocks(const checkpoint::ModuleIdentity& identity, const SchemeSpec& spec) const {
    if (spec.strategy != Strategy::kBlock) return absl::OkStatus();
    const std::optional<std::pair<int64_t, int64_t>> said = format_.BlockOf(identity);
    if (!said.has_value() || *said == std::pair(static_cast<int64_t>(kBlock), static_cast<int64_t>(kBlock))) return absl::OkStatus();
    return Unreadable(absl::StrCat("config.json says FP8 blocks of ", said->first, " x ", said->second,
                                   ", its tensors fit blocks of 128 x 128, which are the only ones that can be read"));
  }

  // Scales under two names may differ, and nothing says which of them holds.
  absl::Status CheckOneScale(const Parts& parts) const {
    std::vector<std::string> found;
    for (const absl::string_view name : kFp8Scales) {
      if (const size_t* scale = Find(parts, name)) found.push_back(Info(*scale).name);
    }
    if (found.size() < 2) return absl::OkStatus();
    return Unreadable(absl::StrCat("it is FP8 with scales under ", found.size(),
                                   " names, and nothing says which one counts: remove all but one of ", absl::StrJoin(found, " and ")));
  }

  absl::StatusOr<std::optional<SourceWeight>> Fp8(const checkpoint::ModuleIdentity& identity, const Parts& parts, size_t weight) {
    const TensorInfo& info = Info(weight);
    QUERN_RETURN_IF_ERROR(CheckOneScale(parts));
    for (const absl::string_view name : kFp8Scales) {
      const size_t* const scale = Find(parts, name);
      if (scale == nullptr) continue;
      QUERN_ASSIGN_OR_RETURN(const auto scheme, Fp8Scheme(info.shape[0], info.shape[1], Info(*scale).dtype, Info(*scale).shape));
      QUERN_RETURN_IF_ERROR(CheckBlocks(identity, scheme.first));
      return Match(scheme.first, scheme.second, info.shape[0], info.shape[1], {{"weight", weight}, {"weight_scale", *scale}});
    }
    return Unreadable("it is FP8 without weight_scale or weight_scale_inv");
  }

  // ---- Weights of all experts in one tensor.

  struct StackTensor {
    ExpertStack stack;
    size_t module = 0;  // of the tensor itself
    size_t tensor = 0;
    std::optional<size_t> scale;
    checkpoint::StackAxes axes;
  };

  // Whether the module is a stack of experts; then it is cut later, or marked as one that cannot be.
  bool ResolveStack(size_t m) {
    SourceModule& module = modules()[m];
    const Parts& parts = parts_[m];
    std::optional<size_t> tensor;
    for (const auto& [parameter, index] : parts) {
      if (parameter.empty() || parameter == "weight") tensor = index;
    }
    if (!tensor.has_value()) return false;
    std::optional<ExpertStack> stack = family_.FindStack(Info(*tensor).name);
    // Without a description, what has an axis for the experts is a stack all the same.
    const size_t dimensions = Info(*tensor).shape.size();
    if (!stack.has_value() || (stack->form == ExpertStack::Form::kValues && dimensions < 3)) {
      // MXFP4 as gpt-oss has it, whatever the model.
      const bool blocks = Info(*tensor).dtype == DType::kU8 && absl::EndsWith(Info(*tensor).name, "_blocks");
      const bool experts = module.identity.role == checkpoint::Role::kRoutedExperts && !module.identity.expert.has_value();
      // Those of a model that nobody described may also lie one below the other in a matrix (DBRX): it is no linear module's weight.
      const bool flat = dimensions == 2 && experts && !family_.known() && module.identity.parameter.empty() &&
                        (IsPlainDType(Info(*tensor).dtype) || IsCodeDType(Info(*tensor).dtype)) &&
                        !absl::EndsWith(Info(*tensor).name, "bias");
      if (!flat && (dimensions < 3 || !(experts || blocks))) return false;
      module.is_stack = true;
      module.described = !IsPlainDType(Info(*tensor).dtype);
      module.unreadable = module.described ? absl::StrCat("codes of several experts in one tensor of ", DTypeName(Info(*tensor).dtype),
                                                          ", whose layout is not known")
                                           : "its layout is not known";
      for (const auto& [parameter, index] : parts) module.tensors.push_back(index);
      return true;
    }
    if (stack->form == ExpertStack::Form::kBias) return false;
    if (stack->form == ExpertStack::Form::kScales) {
      scales_of_[stack->base] = m;
      return true;
    }
    StackTensor entry{*std::move(stack), m, *tensor, std::nullopt, {}};
    for (const absl::string_view name : {"weight_scale_inv", "weight_scale"}) {
      if (const size_t* scale = Find(parts, name); scale != nullptr && !entry.scale.has_value()) entry.scale = *scale;
    }
    stacks_[entry.stack.experts].push_back(std::move(entry));
    return true;
  }

  void CutStacks() {
    for (auto& [experts, tensors] : stacks_) {
      std::vector<SourceModule> cut;
      SourceStack stack;
      std::string problem;
      for (StackTensor& entry : tensors) {
        if (const auto scales = scales_of_.find(entry.stack.base); scales != scales_of_.end()) {
          entry.scale = parts_[scales->second].front().second;
          stack.tensors.push_back(*entry.scale);
          used_scales_.push_back(scales->second);
        }
      }
      const absl::Status resolved = ResolveAxes(tensors);
      if (!resolved.ok()) problem = std::string(resolved.message());
      for (const StackTensor& entry : tensors) {
        if (!problem.empty()) break;
        const absl::Status status = Cut(entry, cut, stack.quantized);
        if (!status.ok()) problem = absl::StrCat(Info(entry.tensor).name, ": ", status.message());
      }
      for (const StackTensor& entry : tensors) {
        if (problem.empty() && IsPlainDType(Info(entry.tensor).dtype)) SetAsideStrays(Info(entry.tensor).name);
        SourceModule& whole = modules()[entry.module];
        const bool plain = IsPlainDType(Info(entry.tensor).dtype);
        for (const auto& [parameter, tensor] : parts_[entry.module]) {
          const bool of_weight = tensor == entry.tensor || (!plain && entry.scale == tensor);
          if (problem.empty() && plain && IsStrayBesidePlain(parameter)) {
            result_.strays.push_back(tensor);
          } else {
            (problem.empty() && of_weight ? stack.tensors : whole.tensors).push_back(tensor);
          }
        }
        if (!problem.empty()) {
          whole.is_stack = true;
          whole.unreadable = problem;
          whole.described = !IsPlainDType(Info(entry.tensor).dtype);
        }
      }
      if (!problem.empty()) {
        for (const StackTensor& entry : tensors) {
          if (const auto scales = scales_of_.find(entry.stack.base); scales != scales_of_.end()) {
            modules()[scales->second].tensors.push_back(*entry.scale);
          }
        }
        continue;
      }
      for (SourceModule& module : cut) {
        module.stack = result_.stacks.size();
        stack.modules.push_back(modules().size());
        modules().push_back(std::move(module));
      }
      result_.stacks.push_back(std::move(stack));
    }
    // Scales without blocks.
    for (const auto& [base, m] : scales_of_) {
      if (std::find(used_scales_.begin(), used_scales_.end(), m) != used_scales_.end()) continue;
      for (const auto& [parameter, tensor] : parts_[m]) modules()[m].tensors.push_back(tensor);
    }
    // What was cut is no module any more.
    std::vector<size_t> moved(modules().size());
    size_t next = 0;
    for (size_t m = 0; m < modules().size(); ++m) {
      moved[m] = next;
      const bool gone = !modules()[m].weight.has_value() && modules()[m].tensors.empty();
      if (gone) continue;
      if (next != m) modules()[next] = std::move(modules()[m]);
      ++next;
    }
    modules().resize(next);
    for (SourceStack& stack : result_.stacks) {
      for (size_t& m : stack.modules) m = moved[m];
    }
  }

  // Beside a plain stack that has no ".weight", what would describe it has a name of its own: "gate_up_proj_scale".
  void SetAsideStrays(absl::string_view stack) {
    for (const absl::string_view suffix :
         {"scale", "scales", "scale_inv", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale"}) {
      const auto found = by_name_.find(absl::StrCat(stack, "_", suffix));
      if (found == by_name_.end() || modules()[found->second].weight.has_value()) continue;
      SourceModule& module = modules()[found->second];
      result_.strays.insert(result_.strays.end(), module.tensors.begin(), module.tensors.end());
      module.tensors.clear();
    }
  }

  // In a checkpoint that is quantized, codes that no rule says how to read: without the config that spoke of them they would pass for
  // values.
  void MarkStrangeCodes() {
    const auto decoded = [](const SourceModule& module) { return module.weight.has_value() && module.weight->decoder != nullptr; };
    if (checkpoint_.config().quantization_config.empty() && std::none_of(modules().begin(), modules().end(), decoded)) return;
    for (SourceModule& module : modules()) {
      if (!module.unreadable.empty() && module.described) continue;
      for (const size_t tensor : module.tensors) {
        const TensorInfo& info = Info(tensor);
        const bool integer = info.dtype == DType::kI32 || info.dtype == DType::kU32 || info.dtype == DType::kI16 ||
                             info.dtype == DType::kU16 || IsCodeDType(info.dtype);
        const bool codes = IsSmallFloat(info.dtype) || (integer && absl::EndsWith(info.name, ".weight"));
        if (!codes || info.shape.size() < 2 || info.elements() == 0) continue;
        module.weight.reset();
        module.unreadable =
            absl::StrCat(info.name, " is ", DTypeName(info.dtype), " ", ShapeText(info), ", and nothing says what its codes mean");
        module.described = true;
        break;
      }
    }
  }

  // Axes of the stacks of one layer. Where a shape fits both ways, one that does not tells: they are all stored the same way.
  absl::Status ResolveAxes(std::vector<StackTensor>& tensors) const {
    const StackTensor* certain = nullptr;
    for (StackTensor& entry : tensors) {
      absl::StatusOr<checkpoint::StackAxes> axes =
          checkpoint::ResolveStackAxes(entry.stack, Info(entry.tensor).shape, checkpoint_.config());
      if (!axes.ok()) return Annotate(axes.status(), Info(entry.tensor).name);
      entry.axes = *axes;
      if (axes->certain) certain = &entry;
      if (axes->experts != tensors.front().axes.experts) {
        return Unreadable(absl::StrCat(Info(entry.tensor).name, " holds ", axes->experts, " experts, ", Info(tensors.front().tensor).name,
                                       " ", tensors.front().axes.experts));
      }
    }
    for (StackTensor& entry : tensors) {
      if (certain != nullptr && !entry.axes.certain && entry.axes.transposed != certain->axes.transposed) entry.axes = entry.axes.Turned();
    }
    return absl::OkStatus();
  }

  absl::Status Cut(const StackTensor& entry, std::vector<SourceModule>& cut, bool& quantized) {
    const TensorInfo& info = Info(entry.tensor);
    const checkpoint::StackAxes& axes = entry.axes;
    const bool blocks = entry.stack.form == ExpertStack::Form::kBlocks;
    if (!blocks && !IsPlainDType(info.dtype) && !(info.dtype == DType::kF8E4M3 && entry.scale.has_value())) {
      return Unreadable(absl::StrCat("a stack of experts in ", DTypeName(info.dtype), " cannot be read"));
    }
    if (info.dtype == DType::kF8E4M3) QUERN_RETURN_IF_ERROR(CheckOneScale(parts_[entry.module]));
    quantized = quantized || blocks || info.dtype == DType::kF8E4M3;
    for (uint64_t expert = 0; expert < axes.experts; ++expert) {
      for (size_t part = 0; part < entry.stack.names.size(); ++part) {
        const checkpoint::StackSlice slice = checkpoint::SliceOfStack(entry.stack, axes, expert, part);
        SourceModule module;
        module.identity =
            family_.Identify(absl::StrCat(entry.stack.experts, ".", expert, ".", entry.stack.names[part], ".weight"), checkpoint_.config());
        if (by_name_.contains(module.identity.module)) {
          return Unreadable(absl::StrCat(module.identity.module, " is in this tensor, and has tensors of its own besides"));
        }
        module.stack_tensor = modules()[entry.module].identity.module;
        SourceWeight& weight = module.weight.emplace();
        weight.rows = slice.rows;
        weight.cols = slice.cols;
        weight.tensor = entry.tensor;
        if (blocks) {
          QUERN_RETURN_IF_ERROR(CutBlocks(entry, axes, slice, weight));
        } else if (info.dtype == DType::kF8E4M3) {
          QUERN_RETURN_IF_ERROR(CutFp8(entry, axes, expert, part, slice, module.identity, weight));
        } else {
          const uint64_t width = static_cast<uint64_t>(BytesPerElement(info.dtype));
          weight.dtype = info.dtype;
          weight.offset = slice.first * width;
          weight.row_stride = slice.row_stride * width;
          weight.col_stride = slice.col_stride * width;
        }
        cut.push_back(std::move(module));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CutBlocks(const StackTensor& entry, const checkpoint::StackAxes& axes, const checkpoint::StackSlice& slice,
                         SourceWeight& weight) {
    const TensorInfo& info = Info(entry.tensor);
    if (!entry.scale.has_value()) return Unreadable("its blocks have no scales beside them");
    const TensorInfo& scales = Info(*entry.scale);
    const std::vector<uint64_t> expected = {axes.experts, axes.out, axes.in / kMxGroup};
    if (info.dtype != DType::kU8 || !IsByteExponent(scales.dtype) || scales.shape != expected) {
      return Unreadable(absl::StrCat("MXFP4 blocks ", ShapeText(info), " need scales U8 [", absl::StrJoin(expected, ", "), "], not ",
                                     DTypeName(scales.dtype), " ", ShapeText(scales)));
    }
    QUERN_ASSIGN_OR_RETURN(weight.decoder, quant::Scheme::For(FloatSpec(4, Strategy::kGroup, kMxGroup, ScaleType::kE8m0)));
    weight.dtype = DType::kBF16;
    weight.regions = {
        {"weight_packed", entry.tensor, slice.first / 2, slice.rows, slice.cols / 2, slice.row_stride / 2},
        {"weight_scale", *entry.scale, slice.first / kMxGroup, slice.rows, slice.cols / kMxGroup, slice.row_stride / kMxGroup}};
    return absl::OkStatus();
  }

  // FP8 in blocks, scales [experts, out/128, in/128].
  absl::Status CutFp8(const StackTensor& entry, const checkpoint::StackAxes& axes, uint64_t expert, size_t part,
                      const checkpoint::StackSlice& slice, const checkpoint::ModuleIdentity& identity, SourceWeight& weight) {
    const TensorInfo& scales = Info(*entry.scale);
    if (axes.transposed || entry.stack.interleaved || (entry.stack.names.size() > 1 && slice.rows % kBlock != 0)) {
      return Unreadable("FP8 blocks of this stack lie across the matrices of an expert");
    }
    const std::vector<uint64_t> expected = {axes.experts, Blocks(axes.out), Blocks(axes.in)};
    if (scales.shape != expected) {
      return Unreadable(absl::StrCat("FP8 ", ShapeText(Info(entry.tensor)), " needs scales [", absl::StrJoin(expected, ", "), "], not ",
                                     ShapeText(scales)));
    }
    QUERN_ASSIGN_OR_RETURN(const auto scheme, Fp8Scheme(slice.rows, slice.cols, scales.dtype, {Blocks(slice.rows), Blocks(slice.cols)}));
    QUERN_RETURN_IF_ERROR(CheckBlocks(identity, scheme.first));
    QUERN_ASSIGN_OR_RETURN(weight.decoder, quant::Scheme::For(scheme.first));
    weight.dtype = scheme.second;
    const uint64_t row_bytes = Blocks(axes.in) * static_cast<uint64_t>(BytesPerElement(scales.dtype));
    const uint64_t first_row = expert * Blocks(axes.out) + part * (slice.rows / kBlock);
    weight.regions = {{"weight", entry.tensor, slice.first, slice.rows, slice.cols, slice.row_stride},
                      {"weight_scale", *entry.scale, first_row * row_bytes, Blocks(slice.rows), row_bytes, row_bytes}};
    return absl::OkStatus();
  }

  const checkpoint::Checkpoint& checkpoint_;
  const checkpoint::Family& family_;
  StoredFormat format_;
  std::vector<UniqueFd> files_;  // opened for weight_shape
  SourceModules result_;
  std::vector<Parts> parts_;                                // of modules, before stacks are cut
  absl::flat_hash_map<std::string, size_t> by_name_;        // of modules, before stacks are cut
  std::map<std::string, std::vector<StackTensor>> stacks_;  // by the path of the experts
  std::map<std::string, size_t> scales_of_;                 // base of a stack -> module of its scales
  std::vector<size_t> used_scales_;
};

}  // namespace

bool SourceWeight::DecodesToAnyDType() const {
  if (decoder == nullptr) return false;
  const SchemeSpec& spec = decoder->spec();
  if (spec.convention == quant::Convention::kModelOpt) return true;
  const bool groups = spec.strategy == Strategy::kGroup || spec.strategy == Strategy::kTensorGroup;
  return spec.type == quant::NumberType::kFloat && !groups && spec.scale != ScaleType::kWeight;
}

uint64_t SourceWeight::bytes() const {
  if (decoder == nullptr) return elements() * static_cast<uint64_t>(BytesPerElement(dtype));
  uint64_t sum = 0;
  for (const SourceRegion& region : regions) sum += region.rows * region.row_bytes;
  return sum;
}

absl::StatusOr<SourceModules> GatherSourceModules(const checkpoint::Checkpoint& checkpoint) { return Gatherer(checkpoint).Run(); }

}  // namespace quern::daemon
