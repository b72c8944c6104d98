#include "quant/scheme_spec.h"

#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "quant/float_scheme.h"

namespace quern::quant {
namespace {

// A group longer than this is a mistake: tiles must begin at multiples of it.
constexpr int64_t kLargestGroup = int64_t{1} << 16;

template <class E>
struct Named {
  E value;
  const char* name;
};

constexpr Named<NumberType> kTypes[] = {{NumberType::kInt, "int"}, {NumberType::kFloat, "float"}, {NumberType::kPlain, "plain"}};
constexpr Named<Strategy> kStrategies[] = {{Strategy::kTensor, "tensor"},
                                           {Strategy::kChannel, "channel"},
                                           {Strategy::kGroup, "group"},
                                           {Strategy::kBlock, "block"},
                                           {Strategy::kTensorGroup, "tensor_group"}};
constexpr Named<Observer> kObservers[] = {
    {Observer::kMinMax, "minmax"}, {Observer::kMse, "mse"}, {Observer::kImportance, "importance"}, {Observer::kSweep, "sweep"}};
constexpr Named<Numerics> kNumerics[] = {{Numerics::kReference, "reference"}, {Numerics::kPrecise, "precise"}};

constexpr Named<ScaleType> kScaleTypes[] = {{ScaleType::kWeight, "weight"}, {ScaleType::kF32, "f32"},   {ScaleType::kBf16, "bf16"},
                                            {ScaleType::kF16, "f16"},       {ScaleType::kE4m3, "e4m3"}, {ScaleType::kE8m0, "e8m0"}};
constexpr Named<Activations> kActivations[] = {{Activations::kNone, "none"},
                                               {Activations::kInt4Token, "int4_token"},
                                               {Activations::kInt8Token, "int8_token"},
                                               {Activations::kFp8Token, "fp8_token"},
                                               {Activations::kFp8Group128, "fp8_group128"},
                                               {Activations::kFp8Static, "fp8_static"},
                                               {Activations::kNvfp4Static, "nvfp4_static"},
                                               {Activations::kMxfp4, "mxfp4"},
                                               {Activations::kMxfp8, "mxfp8"}};
constexpr Named<Convention> kConventions[] = {{Convention::kCompressedTensors, "compressed-tensors"}, {Convention::kModelOpt, "modelopt"}};

bool HasGroupSize(Strategy strategy) {
  return strategy == Strategy::kGroup || strategy == Strategy::kTensorGroup || strategy == Strategy::kBlock;
}

template <class E, size_t n>
absl::string_view NameOf(const Named<E> (&table)[n], E value) {
  for (const Named<E>& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "unknown";
}

template <class E, size_t n>
bool Lookup(const Named<E> (&table)[n], absl::string_view name, E* value) {
  for (const Named<E>& entry : table) {
    if (entry.name == name) {
      *value = entry.value;
      return true;
    }
  }
  return false;
}

}  // namespace

std::string SchemeSpec::ToString() const {
  std::string text = absl::StrCat(NameOf(kTypes, type), num_bits, " ", NameOf(kStrategies, strategy),
                                  HasGroupSize(strategy) ? absl::StrCat("=", group_size) : "", symmetric ? " symmetric" : " asymmetric",
                                  " observer=", NameOf(kObservers, observer), " numerics=", NameOf(kNumerics, numerics));
  if (scale != ScaleType::kWeight) absl::StrAppend(&text, " scale=", NameOf(kScaleTypes, scale));
  if (activations != Activations::kNone) absl::StrAppend(&text, " activations=", NameOf(kActivations, activations));
  if (convention != Convention::kCompressedTensors) absl::StrAppend(&text, " convention=", NameOf(kConventions, convention));
  return text;
}

absl::StatusOr<SchemeSpec> SchemeSpec::Parse(absl::string_view text) {
  const auto invalid = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(
        "scheme \"", text, "\": ", why, "; expected for example \"int4 group=32 asymmetric observer=minmax numerics=reference\""));
  };
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  if (words.size() < 5 || words.size() > 8) return invalid("five to eight words expected");
  SchemeSpec spec;
  const size_t digits = words[0].find_first_of("0123456789");
  if (digits == std::string::npos || !Lookup(kTypes, absl::string_view(words[0]).substr(0, digits), &spec.type) ||
      !absl::SimpleAtoi(absl::string_view(words[0]).substr(digits), &spec.num_bits) || spec.num_bits < 1 || spec.num_bits > 32) {
    return invalid(absl::StrCat("\"", words[0], "\" is no number type"));
  }
  const std::pair<absl::string_view, absl::string_view> strategy = absl::StrSplit(words[1], absl::MaxSplits('=', 1));
  if (!Lookup(kStrategies, strategy.first, &spec.strategy)) return invalid(absl::StrCat("\"", words[1], "\" is no strategy"));
  spec.group_size = 0;
  if (HasGroupSize(spec.strategy) && (!absl::SimpleAtoi(strategy.second, &spec.group_size) || spec.group_size < 1)) {
    return invalid(absl::StrCat("\"", words[1], "\" has no group size"));
  }
  if (words[2] != "symmetric" && words[2] != "asymmetric")
    return invalid(absl::StrCat("\"", words[2], "\" is neither symmetric nor asymmetric"));
  spec.symmetric = words[2] == "symmetric";
  absl::string_view observer = words[3], numerics = words[4];
  if (!absl::ConsumePrefix(&observer, "observer=") || !Lookup(kObservers, observer, &spec.observer)) {
    return invalid(absl::StrCat("\"", words[3], "\" is no observer"));
  }
  if (!absl::ConsumePrefix(&numerics, "numerics=") || !Lookup(kNumerics, numerics, &spec.numerics)) {
    return invalid(absl::StrCat("\"", words[4], "\" is no numerics mode"));
  }
  for (size_t i = 5; i < words.size(); ++i) {
    absl::string_view value = words[i];
    const bool known = (absl::ConsumePrefix(&value, "scale=") && Lookup(kScaleTypes, value, &spec.scale)) ||
                       (absl::ConsumePrefix(&value, "activations=") && Lookup(kActivations, value, &spec.activations)) ||
                       (absl::ConsumePrefix(&value, "convention=") && Lookup(kConventions, value, &spec.convention));
    if (!known) return invalid(absl::StrCat("\"", words[i], "\" is no property of a scheme"));
  }
  // One text a spec: spellings such as "int04" or "channel=7" are refused.
  if (spec.ToString() != text) return invalid(absl::StrCat("not canonical, write \"", spec.ToString(), "\""));
  return spec;
}

namespace {

SchemeSpec IntegerPreset(int bits, Strategy strategy, bool symmetric, Activations activations) {
  SchemeSpec spec;
  spec.num_bits = bits;
  spec.strategy = strategy;
  spec.group_size = strategy == Strategy::kGroup ? 128 : 0;
  spec.symmetric = symmetric;
  spec.activations = activations;
  return spec;
}

SchemeSpec FloatPreset(int bits, Strategy strategy, int64_t group_size, ScaleType scale, Activations activations) {
  SchemeSpec spec;
  spec.num_bits = bits;
  spec.type = NumberType::kFloat;
  spec.strategy = strategy;
  spec.group_size = group_size;
  spec.scale = scale;
  spec.activations = activations;
  return spec;
}

const std::vector<std::pair<std::string, SchemeSpec>>& Presets() {
  static const auto* const presets = [] {
    auto* all = new std::vector<std::pair<std::string, SchemeSpec>>();
    for (int bits = 2; bits <= 8; ++bits) {
      all->emplace_back(absl::StrCat("W", bits, "A16"), IntegerPreset(bits, Strategy::kGroup, true, Activations::kNone));
      all->emplace_back(absl::StrCat("W", bits, "A16_ASYM"), IntegerPreset(bits, Strategy::kGroup, false, Activations::kNone));
      if (bits < 8) all->emplace_back(absl::StrCat("W", bits, "A8"), IntegerPreset(bits, Strategy::kGroup, true, Activations::kInt8Token));
    }
    for (int bits = 2; bits <= 4; ++bits) {
      all->emplace_back(absl::StrCat("W", bits, "A4"), IntegerPreset(bits, Strategy::kGroup, true, Activations::kInt4Token));
    }
    all->emplace_back("W8A8", IntegerPreset(8, Strategy::kChannel, true, Activations::kInt8Token));
    all->emplace_back("INT8", IntegerPreset(8, Strategy::kChannel, true, Activations::kInt8Token));  // another name of W8A8
    all->emplace_back("W4AFP8", IntegerPreset(4, Strategy::kGroup, true, Activations::kFp8Token));
    all->emplace_back("FP8", FloatPreset(8, Strategy::kTensor, 0, ScaleType::kWeight, Activations::kFp8Static));
    all->emplace_back("FP8_DYNAMIC", FloatPreset(8, Strategy::kChannel, 0, ScaleType::kWeight, Activations::kFp8Token));
    all->emplace_back("FP8_BLOCK", FloatPreset(8, Strategy::kBlock, 128, ScaleType::kWeight, Activations::kFp8Group128));
    // Weights only.
    all->emplace_back("FP8A16", FloatPreset(8, Strategy::kChannel, 0, ScaleType::kWeight, Activations::kNone));
    all->emplace_back("NVFP4", FloatPreset(4, Strategy::kTensorGroup, 16, ScaleType::kE4m3, Activations::kNvfp4Static));
    all->emplace_back("NVFP4A16", FloatPreset(4, Strategy::kTensorGroup, 16, ScaleType::kE4m3, Activations::kNone));
    all->emplace_back("MXFP4", FloatPreset(4, Strategy::kGroup, 32, ScaleType::kE8m0, Activations::kMxfp4));
    all->emplace_back("MXFP4A16", FloatPreset(4, Strategy::kGroup, 32, ScaleType::kE8m0, Activations::kNone));
    all->emplace_back("MXFP8", FloatPreset(8, Strategy::kGroup, 32, ScaleType::kE8m0, Activations::kMxfp8));
    all->emplace_back("MXFP8A16", FloatPreset(8, Strategy::kGroup, 32, ScaleType::kE8m0, Activations::kNone));
    return all;
  }();
  return *presets;
}

}  // namespace

std::vector<std::string> PresetNames() {
  std::vector<std::string> names;
  for (const auto& [name, spec] : Presets()) names.push_back(name);
  return names;
}

absl::StatusOr<SchemeSpec> PresetScheme(absl::string_view name) {
  const std::string upper = absl::AsciiStrToUpper(name);
  for (const auto& [known, spec] : Presets()) {
    if (known == upper) return spec;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown scheme \"", name, "\"; known are ", absl::StrJoin(PresetNames(), ", ")));
}

absl::string_view FormatName(const SchemeSpec& spec) {
  if (spec.type == NumberType::kPlain) return "dense";
  if (spec.type == NumberType::kInt) return spec.activations == Activations::kNone ? "pack-quantized" : "int-quantized";
  if (spec.scale == ScaleType::kE8m0) return spec.num_bits == 4 ? "mxfp4-pack-quantized" : "mxfp8-quantized";
  if (spec.num_bits == 4) return "nvfp4-pack-quantized";
  return spec.activations == Activations::kNone ? "naive-quantized" : "float-quantized";
}

absl::StatusOr<SchemeSpec> ToModelOpt(const SchemeSpec& spec) {
  SchemeSpec result = spec;
  result.convention = Convention::kModelOpt;
  const bool fp8 = spec.type == NumberType::kFloat && spec.num_bits == 8 && spec.scale == ScaleType::kWeight;
  const bool nvfp4 = spec.type == NumberType::kFloat && spec.num_bits == 4 && spec.strategy == Strategy::kTensorGroup;
  if (fp8 && ((spec.strategy == Strategy::kChannel && spec.activations == Activations::kFp8Token) ||
              (spec.strategy == Strategy::kTensor && spec.activations == Activations::kFp8Static))) {
    result.scale = ScaleType::kF32;
    return result;
  }
  if (nvfp4) return result;
  return absl::InvalidArgumentError(
      absl::StrCat("scheme \"", spec.ToString(), "\" has no form in ModelOpt's format; it has FP8_DYNAMIC, FP8, NVFP4A16 and NVFP4"));
}

absl::StatusOr<SchemeSpec> PlainSpec(DType dtype) {
  SchemeSpec spec;
  spec.type = NumberType::kPlain;
  spec.num_bits = dtype == DType::kF32 ? 32 : 16;
  spec.strategy = Strategy::kTensor;
  spec.group_size = 0;
  if (dtype == DType::kBF16) spec.scale = ScaleType::kBf16;
  if (PlainDType(spec) != dtype) {
    return absl::InvalidArgumentError(absl::StrCat("plain weights are BF16, F16 or F32, not ", DTypeName(dtype)));
  }
  return spec;
}

DType PlainDType(const SchemeSpec& spec) {
  if (spec.num_bits == 32) return DType::kF32;
  return spec.scale == ScaleType::kBf16 ? DType::kBF16 : DType::kF16;
}

absl::Status CheckSupported(const SchemeSpec& spec) {
  const auto unsupported = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("scheme \"", spec.ToString(), "\" is not supported: ", what));
  };
  if (spec.type == NumberType::kFloat) return CheckFloatScheme(spec);
  if (spec.type == NumberType::kPlain) {
    const absl::StatusOr<SchemeSpec> plain = PlainSpec(PlainDType(spec));
    return *plain == spec ? absl::OkStatus() : unsupported(absl::StrCat("plain values of that dtype are \"", plain->ToString(), "\""));
  }
  if (spec.num_bits < 2 || spec.num_bits > 8) return unsupported("integers have 2 to 8 bits");
  if (spec.strategy != Strategy::kGroup && spec.strategy != Strategy::kChannel && spec.strategy != Strategy::kTensor) {
    return unsupported("strategies of integers are group, channel and tensor");
  }
  if (spec.strategy == Strategy::kGroup && (spec.group_size < 1 || spec.group_size > kLargestGroup)) {
    return unsupported(absl::StrCat("a group has 1 to ", kLargestGroup, " columns"));
  }
  if (spec.strategy != Strategy::kGroup && spec.group_size != 0) return unsupported("channel and tensor have no group size");
  if (spec.scale != ScaleType::kWeight) return unsupported("scales of integers are of the weight's dtype");
  if (spec.convention != Convention::kCompressedTensors) return unsupported("integers exist in the convention of compressed-tensors only");
  if (spec.activations != Activations::kNone && spec.activations != Activations::kInt4Token &&
      spec.activations != Activations::kInt8Token && spec.activations != Activations::kFp8Token) {
    return unsupported("activations beside integer weights are int4_token, int8_token or fp8_token");
  }
  if (spec.observer == Observer::kSweep) return unsupported("the sweep over block scales is for NVFP4");
  if (spec.observer != Observer::kMinMax && spec.strategy == Strategy::kTensor) {
    return unsupported("with one scale for the whole weight the observer is minmax");
  }
  return absl::OkStatus();
}

}  // namespace quern::quant
