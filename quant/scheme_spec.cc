#include "quant/scheme_spec.h"

#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace quern::quant {
namespace {

// A group longer than this is a mistake: tiles must begin at multiples of it.
constexpr int64_t kLargestGroup = int64_t{1} << 16;

template <class E>
struct Named {
  E value;
  const char* name;
};

constexpr Named<NumberType> kTypes[] = {{NumberType::kInt, "int"}, {NumberType::kFloat, "float"}};
constexpr Named<Strategy> kStrategies[] = {{Strategy::kTensor, "tensor"},
                                           {Strategy::kChannel, "channel"},
                                           {Strategy::kGroup, "group"},
                                           {Strategy::kBlock, "block"},
                                           {Strategy::kTensorGroup, "tensor_group"}};
constexpr Named<Observer> kObservers[] = {{Observer::kMinMax, "minmax"}, {Observer::kMse, "mse"}, {Observer::kImportance, "importance"}};
constexpr Named<Numerics> kNumerics[] = {{Numerics::kReference, "reference"}, {Numerics::kPrecise, "precise"}};

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
  return absl::StrCat(NameOf(kTypes, type), num_bits, " ", NameOf(kStrategies, strategy),
                      strategy == Strategy::kGroup ? absl::StrCat("=", group_size) : "", symmetric ? " symmetric" : " asymmetric",
                      " observer=", NameOf(kObservers, observer), " numerics=", NameOf(kNumerics, numerics));
}

absl::StatusOr<SchemeSpec> SchemeSpec::Parse(absl::string_view text) {
  const auto invalid = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(
        "scheme \"", text, "\": ", why, "; expected for example \"int4 group=32 asymmetric observer=minmax numerics=reference\""));
  };
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  if (words.size() != 5) return invalid("five words expected");
  SchemeSpec spec;
  const size_t digits = words[0].find_first_of("0123456789");
  if (digits == std::string::npos || !Lookup(kTypes, absl::string_view(words[0]).substr(0, digits), &spec.type) ||
      !absl::SimpleAtoi(absl::string_view(words[0]).substr(digits), &spec.num_bits) || spec.num_bits < 1 || spec.num_bits > 16) {
    return invalid(absl::StrCat("\"", words[0], "\" is no number type"));
  }
  const std::pair<absl::string_view, absl::string_view> strategy = absl::StrSplit(words[1], absl::MaxSplits('=', 1));
  if (!Lookup(kStrategies, strategy.first, &spec.strategy)) return invalid(absl::StrCat("\"", words[1], "\" is no strategy"));
  spec.group_size = 0;
  if (spec.strategy == Strategy::kGroup && (!absl::SimpleAtoi(strategy.second, &spec.group_size) || spec.group_size < 1)) {
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
  // One text a spec: spellings such as "int04" or "channel=7" are refused.
  if (spec.ToString() != text) return invalid(absl::StrCat("not canonical, write \"", spec.ToString(), "\""));
  return spec;
}

std::vector<std::string> PresetNames() {
  std::vector<std::string> names;
  for (int bits = 2; bits <= 8; ++bits) {
    names.push_back(absl::StrCat("W", bits, "A16"));
    names.push_back(absl::StrCat("W", bits, "A16_ASYM"));
  }
  return names;
}

absl::StatusOr<SchemeSpec> PresetScheme(absl::string_view name) {
  const std::vector<std::string> names = PresetNames();
  const std::string upper = absl::AsciiStrToUpper(name);
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] != upper) continue;
    SchemeSpec spec;
    spec.num_bits = 2 + static_cast<int>(i / 2);
    spec.symmetric = i % 2 == 0;
    spec.group_size = 128;
    return spec;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown scheme \"", name, "\"; known are ", absl::StrJoin(names, ", ")));
}

absl::Status CheckSupported(const SchemeSpec& spec) {
  const auto unsupported = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("scheme \"", spec.ToString(), "\" is not supported: ", what));
  };
  if (spec.type != NumberType::kInt) return unsupported("only integer weights are");
  if (spec.num_bits < 2 || spec.num_bits > 8) return unsupported("integers have 2 to 8 bits");
  if (spec.strategy != Strategy::kGroup && spec.strategy != Strategy::kChannel) return unsupported("strategies are group and channel");
  if (spec.strategy == Strategy::kGroup && (spec.group_size < 1 || spec.group_size > kLargestGroup)) {
    return unsupported(absl::StrCat("a group has 1 to ", kLargestGroup, " columns"));
  }
  if (spec.strategy == Strategy::kChannel && spec.group_size != 0) return unsupported("channel has no group size");
  if (spec.observer != Observer::kMinMax) return unsupported("the only observer is minmax");
  return absl::OkStatus();
}

}  // namespace quern::quant
