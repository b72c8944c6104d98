#include "daemon/recipe/quantization_args.h"

#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace quern::daemon {
namespace {

using quant::Activations;
using quant::NumberType;
using quant::Observer;
using quant::ScaleType;
using quant::SchemeSpec;
using quant::Strategy;

constexpr char kE4m3[] = "torch.float8_e4m3fn";
constexpr char kU8[] = "torch.uint8";
constexpr char kI8[] = "torch.int8";

constexpr Activations kAllActivations[] = {Activations::kInt4Token,   Activations::kInt8Token, Activations::kFp8Token,
                                           Activations::kFp8Group128, Activations::kFp8Static, Activations::kNvfp4Static,
                                           Activations::kMxfp4,       Activations::kMxfp8};

struct NamedObserver {
  Observer observer;
  const char* name;
  const char* other;
};
constexpr NamedObserver kObservers[] = {{Observer::kMinMax, "memoryless_minmax", "minmax"},
                                        {Observer::kMse, "memoryless_mse", "mse"},
                                        {Observer::kImportance, "imatrix_mse", "importance"},
                                        {Observer::kSweep, "nvfp4_sweep", "sweep"}};

QuantizationArgs Inputs(int num_bits, const char* type, const char* strategy, std::optional<int64_t> group_size,
                        QuantizationArgs::Dynamic dynamic, const char* scale_dtype) {
  QuantizationArgs args;
  args.num_bits = num_bits;
  args.type = type;
  args.strategy = strategy;
  args.group_size = group_size;
  args.dynamic = dynamic;
  args.scale_dtype = scale_dtype;
  if (dynamic != QuantizationArgs::Dynamic::kTrue) args.observer = "static_minmax";
  return args;
}

std::string Describe(const QuantizationArgs& args) {
  const char* dynamic = args.dynamic == QuantizationArgs::Dynamic::kTrue    ? "dynamic"
                        : args.dynamic == QuantizationArgs::Dynamic::kLocal ? "dynamic: local"
                                                                            : "static";
  return absl::StrCat(args.type, " ", args.num_bits, " bits, ", args.strategy, args.group_size ? absl::StrCat(" ", *args.group_size) : "",
                      args.symmetric ? "" : ", asymmetric", ", ", dynamic,
                      args.scale_dtype.empty() ? "" : absl::StrCat(", scale_dtype ", args.scale_dtype));
}

}  // namespace

absl::StatusOr<QuantizationArgs> WeightArgs(const SchemeSpec& spec) {
  if (spec.type == NumberType::kPlain || spec.convention != quant::Convention::kCompressedTensors) {
    return absl::InvalidArgumentError(absl::StrCat("scheme \"", spec.ToString(), "\" is none of compressed-tensors"));
  }
  QuantizationArgs args;
  args.num_bits = spec.num_bits;
  args.type = spec.type == NumberType::kInt ? "int" : "float";
  args.symmetric = spec.symmetric;
  args.observer = std::string(ObserverName(spec.observer));
  switch (spec.strategy) {
    case Strategy::kTensor:
      args.strategy = "tensor";
      break;
    case Strategy::kChannel:
      args.strategy = "channel";
      break;
    case Strategy::kGroup:
      args.strategy = "group";
      args.group_size = spec.group_size;
      break;
    case Strategy::kBlock:
      args.strategy = "block";
      args.block_rows = args.block_columns = spec.group_size;
      break;
    case Strategy::kTensorGroup:
      args.strategy = "tensor_group";
      args.group_size = spec.group_size;
      break;
  }
  switch (spec.scale) {
    case ScaleType::kWeight:
      break;
    case ScaleType::kE4m3:
      args.scale_dtype = kE4m3;
      break;
    case ScaleType::kE8m0:
      args.scale_dtype = kU8;
      break;
    case ScaleType::kF32:
    case ScaleType::kBf16:
    case ScaleType::kF16:
      return absl::InvalidArgumentError(absl::StrCat("scheme \"", spec.ToString(), "\" has scales that compressed-tensors does not store"));
  }
  if (!spec.symmetric) args.zp_dtype = kI8;
  return args;
}

std::optional<QuantizationArgs> InputArgs(Activations activations) {
  using Dynamic = QuantizationArgs::Dynamic;
  switch (activations) {
    case Activations::kNone:
      return std::nullopt;
    case Activations::kInt4Token:
      return Inputs(4, "int", "token", std::nullopt, Dynamic::kTrue, "");
    case Activations::kInt8Token:
      return Inputs(8, "int", "token", std::nullopt, Dynamic::kTrue, "");
    case Activations::kFp8Token:
      return Inputs(8, "float", "token", std::nullopt, Dynamic::kTrue, "");
    case Activations::kFp8Group128:
      return Inputs(8, "float", "group", 128, Dynamic::kTrue, "");
    case Activations::kFp8Static:
      return Inputs(8, "float", "tensor", std::nullopt, Dynamic::kFalse, "");
    case Activations::kNvfp4Static:
      return Inputs(4, "float", "tensor_group", 16, Dynamic::kLocal, kE4m3);
    case Activations::kMxfp4:
      return Inputs(4, "float", "group", 32, Dynamic::kTrue, kU8);
    case Activations::kMxfp8:
      return Inputs(8, "float", "group", 32, Dynamic::kTrue, kU8);
  }
  return std::nullopt;
}

absl::StatusOr<SchemeSpec> SpecOf(const QuantizationArgs& weights) {
  if (weights.dynamic != QuantizationArgs::Dynamic::kFalse) return absl::InvalidArgumentError("weights cannot be dynamic");
  SchemeSpec spec;
  spec.num_bits = weights.num_bits;
  spec.symmetric = weights.symmetric;
  spec.group_size = 0;
  if (weights.type == "int") {
    spec.type = NumberType::kInt;
  } else if (weights.type == "float") {
    spec.type = NumberType::kFloat;
  } else {
    return absl::InvalidArgumentError(absl::StrCat("type is int or float, not \"", weights.type, "\""));
  }
  if (spec.type == NumberType::kFloat && spec.num_bits != 4 && spec.num_bits != 8) {
    return absl::InvalidArgumentError(absl::StrCat("floats have 4 bits (E2M1) or 8 (E4M3), not ", spec.num_bits));
  }
  if (spec.type == NumberType::kFloat && !spec.symmetric)
    return absl::InvalidArgumentError("floats are symmetric: they have no zero point");

  const bool grouped = weights.strategy == "group" || weights.strategy == "tensor_group";
  if (grouped != weights.group_size.has_value()) {
    return absl::InvalidArgumentError(grouped ? absl::StrCat("strategy ", weights.strategy, " needs a group_size")
                                              : absl::StrCat("group_size does not go with strategy ", weights.strategy));
  }
  if (weights.strategy != "block" && weights.block_rows.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("block_structure does not go with strategy ", weights.strategy));
  }
  if (weights.strategy == "group") {
    spec.strategy = Strategy::kGroup;
    spec.group_size = *weights.group_size;
  } else if (weights.strategy == "tensor_group") {
    spec.strategy = Strategy::kTensorGroup;
    spec.group_size = *weights.group_size;
  } else if (weights.strategy == "channel") {
    spec.strategy = Strategy::kChannel;
  } else if (weights.strategy == "tensor") {
    spec.strategy = Strategy::kTensor;
  } else if (weights.strategy == "block") {
    if (!weights.block_rows.has_value()) return absl::InvalidArgumentError("strategy block needs a block_structure such as [128, 128]");
    if (weights.block_rows != weights.block_columns) return absl::InvalidArgumentError("blocks have as many rows as columns");
    spec.strategy = Strategy::kBlock;
    spec.group_size = *weights.block_rows;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown strategy \"", weights.strategy, "\" of weights; known: group, channel, tensor, block, tensor_group"));
  }

  if (spec.type == NumberType::kFloat) {
    if (spec.strategy == Strategy::kTensorGroup) {
      spec.scale = ScaleType::kE4m3;
    } else if (spec.strategy == Strategy::kGroup) {
      // Without a scale_dtype four bits in groups are MXFP4 to compressed-tensors; eight bits are another format, which nobody serves.
      if (spec.num_bits == 8 && weights.scale_dtype.empty()) {
        return absl::InvalidArgumentError("8-bit floats in groups need scale_dtype torch.uint8 (MXFP8)");
      }
      spec.scale = ScaleType::kE8m0;
    }
  }
  const char* scale_dtype = spec.scale == ScaleType::kE4m3 ? kE4m3 : spec.scale == ScaleType::kE8m0 ? kU8 : "";
  if (!weights.scale_dtype.empty() && weights.scale_dtype != scale_dtype) {
    return absl::InvalidArgumentError(absl::StrCat("scale_dtype ", weights.scale_dtype, " does not go with ", weights.type, " in strategy ",
                                                   weights.strategy, "; it is ", *scale_dtype == '\0' ? "null" : scale_dtype));
  }
  if (!weights.observer.empty()) {
    QUERN_ASSIGN_OR_RETURN(spec.observer, ParseObserver(weights.observer));
  }
  return spec;
}

absl::StatusOr<Activations> ActivationsOf(const QuantizationArgs& inputs) {
  std::vector<std::string> known;
  for (Activations activations : kAllActivations) {
    QuantizationArgs args = *InputArgs(activations);
    args.observer = inputs.observer;
    args.zp_dtype = inputs.zp_dtype;
    // NVFP4 has no other scales.
    QuantizationArgs without_dtype = args;
    if (activations == Activations::kNvfp4Static) without_dtype.scale_dtype = "";
    if (args == inputs || without_dtype == inputs) return activations;
    known.push_back(Describe(args));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("input_activations (", Describe(inputs), ") are not supported; known are ", absl::StrJoin(known, "; ")));
}

absl::string_view ObserverName(Observer observer) {
  for (const NamedObserver& entry : kObservers) {
    if (entry.observer == observer) return entry.name;
  }
  return "";
}

absl::StatusOr<Observer> ParseObserver(absl::string_view name) {
  const std::string lower = absl::AsciiStrToLower(name);
  std::vector<std::string> known;
  for (const NamedObserver& entry : kObservers) {
    if (lower == entry.name || lower == entry.other) return entry.observer;
    known.push_back(entry.name);
  }
  if (lower == "static_minmax") return Observer::kMinMax;  // the same for weights
  return absl::InvalidArgumentError(absl::StrCat("unknown observer \"", name, "\"; known: ", absl::StrJoin(known, ", "),
                                                 lower == "nvfp4_expanded_mse" ? " (which also searches every block scale)" : ""));
}

bool HasStaticActivations(const SchemeSpec& spec) {
  return spec.activations == Activations::kFp8Static || spec.activations == Activations::kNvfp4Static;
}

absl::string_view DataFreePreset(const SchemeSpec& spec) {
  return spec.activations == Activations::kNvfp4Static ? "NVFP4A16" : "FP8_DYNAMIC";
}

bool TakesGroupSize(const SchemeSpec& spec) {
  return spec.type == NumberType::kInt && (spec.strategy == Strategy::kGroup || spec.strategy == Strategy::kChannel);
}

std::string PresetOf(const SchemeSpec& spec) {
  for (const std::string& name : quant::PresetNames()) {
    absl::StatusOr<SchemeSpec> preset = quant::PresetScheme(name);
    if (!preset.ok()) continue;
    preset->numerics = spec.numerics;
    preset->observer = spec.observer;
    if (TakesGroupSize(*preset) && TakesGroupSize(spec)) {
      preset->strategy = spec.strategy;
      preset->group_size = spec.group_size;
    }
    if (*preset == spec) return name;
  }
  return "";
}

std::string ShortName(const SchemeSpec& spec) {
  SchemeSpec plain = spec;
  if (spec.convention == quant::Convention::kModelOpt) {  // as it was before quant::ToModelOpt
    plain.convention = quant::Convention::kCompressedTensors;
    if (plain.scale == ScaleType::kF32) plain.scale = ScaleType::kWeight;
  }
  std::string name = PresetOf(plain);
  if (name.empty()) return spec.ToString();
  if (TakesGroupSize(spec)) absl::StrAppend(&name, spec.strategy == Strategy::kChannel ? " channel" : absl::StrCat(" g", spec.group_size));
  if (spec.observer != Observer::kMinMax) absl::StrAppend(&name, " ", ObserverName(spec.observer));
  return name;
}

}  // namespace quern::daemon
