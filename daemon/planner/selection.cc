#include "daemon/planner/selection.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/dtype.h"
#include "base/status_macros.h"
#include "daemon/planner/module_names.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using checkpoint::RoleName;
using checkpoint::TensorInfo;

constexpr int kExamples = 3;
// Texts list whole models in few lines; what is longer than this helps nobody.
constexpr size_t kMaxListedLines = 100;

enum class Form {
  kMatrix,     // a 2-D weight in a floating-point dtype: can be quantized
  kQuantized,  // stored in a quantized format already
  kStack,      // weights of several experts in one tensor
  kOther,
};

struct Candidate {
  Form form = Form::kOther;
  bool linear = false;  // no default ignore covers it
  std::string default_reason;
};

std::string ShapeText(const TensorInfo& info) { return absl::StrCat("[", absl::StrJoin(info.shape, ", "), "]"); }

bool IsWeightDType(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32 || dtype == DType::kF64; }

// Parameters that only a quantized module has.
bool IsQuantizedParameter(absl::string_view parameter) {
  static constexpr absl::string_view kNames[] = {"weight_packed",
                                                 "weight_scale",
                                                 "weight_scale_inv",
                                                 "weight_scale_2",
                                                 "weight_global_scale",
                                                 "weight_zero_point",
                                                 "weight_g_idx",
                                                 "weight_shape",
                                                 "qweight",
                                                 "qzeros",
                                                 "scales",
                                                 "scale"};
  return std::find(std::begin(kNames), std::end(kNames), parameter) != std::end(kNames);
}

Candidate Classify(const SelectedModule& module, const checkpoint::Checkpoint& checkpoint, const std::vector<bool>& quantized) {
  Candidate candidate;
  const Role role = module.identity.role;
  for (size_t tensor : module.tensors) {
    const TensorInfo& info = *checkpoint.tensors()[tensor].info;
    if (quantized[tensor]) candidate.form = Form::kQuantized;
    if (info.shape.size() >= 3 && role == Role::kRoutedExperts && candidate.form == Form::kOther) candidate.form = Form::kStack;
  }
  const TensorInfo& first = *checkpoint.tensors()[module.matrix.value_or(module.tensors.front())].info;
  if (candidate.form == Form::kStack) {
    candidate.default_reason = absl::StrCat("a stack of experts in one tensor, shape ", ShapeText(first));
  } else if (!module.matrix.has_value() && candidate.form != Form::kQuantized) {
    const char* what = first.shape.size() == 2 ? "not the .weight of a module: shape " : "not a 2-D weight: shape ";
    candidate.default_reason = absl::StrCat(role == Role::kNorms ? "norm, " : "", what, ShapeText(first));
  } else if (candidate.form != Form::kQuantized && first.elements() == 0) {
    candidate.default_reason = absl::StrCat("empty: shape ", ShapeText(first));
  } else {
    if (candidate.form == Form::kOther) candidate.form = IsWeightDType(first.dtype) ? Form::kMatrix : Form::kQuantized;
    if (role == Role::kRouter || role == Role::kEmbeddings || role == Role::kLmHead || role == Role::kNorms) {
      candidate.default_reason = std::string(RoleName(role));
    } else {
      candidate.linear = true;
    }
  }
  return candidate;
}

// A pattern with what it matched.
struct Counted {
  const Pattern* pattern;
  std::string scheme;       // of targets
  uint64_t raw = 0;         // modules whose name or role it matches
  uint64_t matches = 0;     // ignore: modules that it keeps; target: modules that its group quantizes
  uint64_t ignored = 0;     // target: modules that the user's ignore took
  uint64_t by_default = 0;  // target: modules that the default ignore took
  std::string by_default_example;
  std::vector<std::string> examples;

  void Add(const std::string& module) {
    if (matches++ < kExamples) examples.push_back(module);
  }
};

quern::v1::PatternMatch ToProto(const Counted& counted, absl::string_view kind) {
  quern::v1::PatternMatch match;
  match.set_kind(std::string(kind));
  match.set_pattern(counted.pattern->text());
  match.set_scheme(counted.scheme);
  match.set_matches(counted.matches);
  for (const std::string& example : counted.examples) match.add_examples(example);
  return match;
}

class Selector {
 public:
  Selector(const checkpoint::Checkpoint& checkpoint, const Recipe& recipe) : checkpoint_(checkpoint), recipe_(recipe) {}

  absl::StatusOr<Selection> Run() {
    QUERN_RETURN_IF_ERROR(LoadSchemes());
    GatherModules();
    for (size_t i = 0; i < modules().size(); ++i) Decide(i);
    if (!checkpoint::Family::For(checkpoint_.config()).known()) Warn(UnknownTypeWarning(checkpoint_.config()));
    CheckPatterns();
    CheckSources();
    KeepOrRefuseMisfits();
    CheckFusedSets();
    if (problems_.empty() &&
        std::none_of(modules().begin(), modules().end(), [](const SelectedModule& m) { return m.scheme != nullptr; })) {
      problems_.push_back("the recipe leaves nothing to quantize");
    }
    if (!problems_.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(checkpoint_.directory(), ": ",
                                                     problems_.size() == 1 ? "" : absl::StrCat(problems_.size(), " problems:\n"),
                                                     absl::StrJoin(problems_, "\n")));
    }
    for (const Counted& counted : ignores_) selection_.patterns.push_back(ToProto(counted, "ignore"));
    for (const auto& group : targets_) {
      for (const Counted& counted : group) selection_.patterns.push_back(ToProto(counted, "target"));
    }
    return std::move(selection_);
  }

 private:
  std::vector<SelectedModule>& modules() { return selection_.modules; }
  const TensorInfo& Info(size_t tensor) const { return *checkpoint_.tensors()[tensor].info; }

  absl::Status LoadSchemes() {
    for (const Pattern& pattern : recipe_.ignore) ignores_.push_back({&pattern, "", 0, 0, 0, 0, "", {}});
    for (const RecipeGroup& group : recipe_.groups) {
      QUERN_ASSIGN_OR_RETURN(const quant::Scheme* const scheme, quant::Scheme::For(group.scheme));
      schemes_.push_back(scheme);
      targets_.emplace_back();
      for (const Pattern& pattern : group.targets) targets_.back().push_back({&pattern, group.scheme.ToString(), 0, 0, 0, 0, "", {}});
    }
    return absl::OkStatus();
  }

  void GatherModules() {
    const checkpoint::Family& family = checkpoint::Family::For(checkpoint_.config());
    const auto& tensors = checkpoint_.tensors();
    absl::flat_hash_map<std::string, size_t> by_name;
    by_name.reserve(tensors.size());
    modules().reserve(tensors.size());
    std::vector<bool> quantized(tensors.size());  // tensors that only a module in a quantized format has
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorInfo& info = *tensors[i].info;
      checkpoint::ModuleIdentity identity = family.Identify(info.name, checkpoint_.config());
      quantized[i] = IsQuantizedParameter(identity.parameter);
      const auto [entry, added] = by_name.try_emplace(identity.module, modules().size());
      if (added) modules().emplace_back();
      SelectedModule& module = modules()[entry->second];
      module.tensors.push_back(i);
      const bool weight = identity.parameter == "weight";
      if (weight && info.shape.size() == 2) module.matrix = i;
      if (added || weight) module.identity = std::move(identity);
    }
    candidates_.reserve(modules().size());
    for (const SelectedModule& module : modules()) candidates_.push_back(Classify(module, checkpoint_, quantized));
  }

  void Decide(size_t index) {
    SelectedModule& module = modules()[index];
    const Candidate& candidate = candidates_[index];
    const std::string& name = module.identity.module;
    const Role role = module.identity.role;
    const Counted* ignored = nullptr;
    for (Counted& counted : ignores_) {
      if (!counted.pattern->Matches(name, role, candidate.linear)) continue;
      ++counted.raw;
      counted.Add(name);
      if (ignored == nullptr) ignored = &counted;
    }
    int chosen = -1;
    for (size_t g = 0; g < targets_.size(); ++g) {
      for (Counted& counted : targets_[g]) {
        if (!counted.pattern->Matches(name, role, candidate.linear)) continue;
        ++counted.raw;
        if (ignored != nullptr) {
          ++counted.ignored;
          continue;
        }
        const Pattern::Kind kind = counted.pattern->kind();
        const bool outright = kind == Pattern::Kind::kExact || kind == Pattern::Kind::kRole;
        // Stacks and quantized weights are matched like the linear weights that they stand for, and refused below.
        const bool wanted = candidate.linear || candidate.form == Form::kStack || (outright && candidate.form != Form::kOther);
        if (!wanted) {
          if (counted.by_default++ == 0) counted.by_default_example = absl::StrCat(name, " (", candidate.default_reason, ")");
          continue;
        }
        if (chosen < 0) {
          chosen = static_cast<int>(g);
          module.reason = counted.pattern->text();
        }
        if (chosen == static_cast<int>(g)) counted.Add(name);
      }
    }
    if (ignored != nullptr) {
      module.reason = absl::StrCat("ignored by ", ignored->pattern->text());
    } else if (chosen < 0) {
      module.reason = candidate.default_reason.empty() ? "no target matches" : candidate.default_reason;
    } else {
      module.scheme = schemes_[chosen];
    }
  }

  void CheckPatterns() {
    for (const auto& group : targets_) {
      for (const Counted& counted : group) {
        if (counted.matches > 0) continue;
        const std::string& text = counted.pattern->text();
        if (counted.raw == 0) {
          problems_.push_back(absl::StrCat("target \"", text, "\" matches no module", Hint(*counted.pattern)));
        } else if (counted.by_default > 0) {
          problems_.push_back(
              absl::StrCat("target \"", text, "\" matches only what is not quantized by default, for example ", counted.by_default_example,
                           "; only 2-D weights can be quantized, and routers, embeddings and lm_head only when named exactly or by role"));
        } else {
          Warn(absl::StrCat("target \"", text, "\" quantizes nothing: of the ", counted.raw, " modules that it matches ", counted.ignored,
                            " are ignored and the rest is taken by earlier targets"));
        }
      }
    }
    for (const Counted& counted : ignores_) {
      if (counted.raw == 0) Warn(absl::StrCat("ignore \"", counted.pattern->text(), "\" matches no module", Hint(*counted.pattern)));
    }
  }

  // What may have been meant by a pattern that matches nothing.
  std::string Hint(const Pattern& pattern) {
    if (modules().empty()) return "; this checkpoint holds no tensors";
    const std::string& text = pattern.text();
    if (pattern.kind() == Pattern::Kind::kRole || pattern.kind() == Pattern::Kind::kLinear) {
      std::set<Role> roles;
      for (const SelectedModule& module : modules()) roles.insert(module.identity.role);
      return absl::StrCat("; this checkpoint has the roles ",
                          absl::StrJoin(roles, ", ", [](std::string* out, Role role) { absl::StrAppend(out, RoleName(role)); }));
    }
    if (absl::EndsWith(text, ".weight")) return "; patterns are matched with the names of modules, which have no \".weight\"";
    if (pattern.kind() == Pattern::Kind::kExact) {
      const std::string below = absl::StrCat(text, ".");
      for (const SelectedModule& module : modules()) {
        if (absl::StartsWith(module.identity.module, below)) return absl::StrCat("; everything below it is \"", below, "*\"");
        if (absl::EndsWith(module.identity.module, absl::StrCat(".", text)))
          return absl::StrCat("; the names that end so are \"*.", text, "\"");
        if (module.identity.transformers_name == text) return absl::StrCat("; the file's name of it is ", module.identity.module);
      }
    }
    return absl::StrCat("; names are like ", modules()[modules().size() / 2].identity.module);
  }

  void CheckSources() {
    std::vector<std::string> quantized, targeted, stacks, copied_stacks, not_matrices;
    for (size_t i = 0; i < modules().size(); ++i) {
      const std::string& name = modules()[i].identity.module;
      const bool chosen = modules()[i].scheme != nullptr;
      if (candidates_[i].form == Form::kQuantized && IsLikelyWeight(modules()[i])) (chosen ? targeted : quantized).push_back(name);
      if (candidates_[i].form == Form::kStack) (chosen ? stacks : copied_stacks).push_back(name);
      if (candidates_[i].form == Form::kOther && chosen) not_matrices.push_back(name);
    }
    if (!targeted.empty()) {
      problems_.push_back(absl::StrCat(
          "modules that are to be quantized are stored in a quantized format already; give the checkpoint in BF16, F16 or F32:",
          Listed(targeted)));
    } else if (!quantized.empty()) {
      problems_.push_back(
          absl::StrCat("the checkpoint holds modules in a quantized format, which one quantization_config cannot describe beside new ones; "
                       "give the checkpoint in BF16, F16 or F32:",
                       Listed(quantized)));
    }
    if (!stacks.empty()) {
      const bool known = checkpoint::Family::For(checkpoint_.config()).known();
      problems_.push_back(absl::StrCat("stacks of experts in one tensor cannot be cut into experts for model_type \"",
                                       checkpoint_.config().model_type, "\"", known ? "" : ", whose layout is not known",
                                       "; save the checkpoint with one 2-D tensor an expert, or ignore them:", Listed(stacks)));
    }
    if (!copied_stacks.empty()) {
      Warn(absl::StrCat("stacks of experts are copied as they are:", Listed(copied_stacks)));
    }
    if (!checkpoint_.config().quantization_config.empty() && quantized.empty() && targeted.empty()) {
      Warn("the source's quantization_config is replaced: no module is stored in a quantized format");
    }
  }

  // Integer tables and masks are no weights in a quantized format.
  static bool IsLikelyWeight(const SelectedModule& module) {
    return module.identity.role != Role::kNorms && module.identity.role != Role::kEmbeddings;
  }

  static std::string Listed(const std::vector<std::string>& names) { return ListedLines(SummarizeNames(names)); }
  static std::string ListedLines(const std::vector<std::string>& lines) {
    std::string text;
    for (size_t i = 0; i < lines.size() && i < kMaxListedLines; ++i) absl::StrAppend(&text, "\n  ", lines[i]);
    if (lines.size() > kMaxListedLines) absl::StrAppend(&text, "\n  and ", lines.size() - kMaxListedLines, " lines more");
    return text;
  }

  // The set of modules that must be treated alike: an engine's fused set, or all routed experts of a layer.
  static std::string UniformSet(const checkpoint::ModuleIdentity& identity) {
    if (identity.expert.has_value()) {
      const std::string number = absl::StrCat(".", *identity.expert, ".");
      const size_t at = identity.module.rfind(number);
      if (at != std::string::npos) return identity.module.substr(0, at);
    }
    return identity.fused_set;
  }

  void KeepOrRefuseMisfits() {
    std::map<std::string, std::vector<std::string>> misfits;  // by shape and reason
    absl::flat_hash_map<std::string, std::string> kept_sets;  // set -> the module that does not fit
    std::vector<size_t> kept;
    struct Fit {
      const quant::Scheme* scheme;
      DType dtype;
      std::vector<uint64_t> shape;
      auto operator<=>(const Fit&) const = default;
    };
    std::map<Fit, absl::Status> fits;
    for (size_t i = 0; i < modules().size(); ++i) {
      SelectedModule& module = modules()[i];
      if (module.scheme == nullptr || candidates_[i].form != Form::kMatrix) continue;
      const TensorInfo& info = Info(*module.matrix);
      Fit key{module.scheme, info.dtype, info.shape};
      auto found = fits.find(key);
      if (found == fits.end()) {
        const quant::Shape2D shape{static_cast<int64_t>(info.shape[0]), static_cast<int64_t>(info.shape[1])};
        found = fits.emplace(std::move(key), module.scheme->CheckWeight(info.dtype, shape)).first;
      }
      if (found->second.ok()) continue;
      const std::string why = absl::StrCat(ShapeText(info), ": ", found->second.message());
      if (recipe_.non_divisible == NonDivisiblePolicy::kFail) {
        misfits[why].push_back(module.identity.module);
        continue;
      }
      module.scheme = nullptr;
      module.reason = absl::StrCat("kept: ", why);
      kept.push_back(i);
      const std::string set = UniformSet(module.identity);
      if (!set.empty()) kept_sets.try_emplace(set, absl::StrCat(module.identity.module, " ", why));
    }
    if (!misfits.empty()) {
      std::vector<std::string> lines;
      for (const auto& [why, names] : misfits) {
        for (const std::string& line : SummarizeNames(names)) lines.push_back(absl::StrCat(line, " ", why));
      }
      problems_.push_back(absl::StrCat(
          "weights that the scheme does not fit; choose another group size, ignore them, or set non_divisible: keep:", ListedLines(lines)));
    }
    // What is used as one with a kept module is kept too.
    for (size_t i = 0; i < modules().size() && !kept_sets.empty(); ++i) {
      SelectedModule& module = modules()[i];
      if (module.scheme == nullptr) continue;
      const auto found = kept_sets.find(UniformSet(module.identity));
      if (found == kept_sets.end()) continue;
      module.scheme = nullptr;
      module.reason = absl::StrCat("kept: used as one with ", found->second);
      kept.push_back(i);
    }
    if (!kept.empty()) {
      std::sort(kept.begin(), kept.end());
      std::vector<std::string> names;
      for (size_t i : kept) names.push_back(modules()[i].identity.module);
      Warn(absl::StrCat("kept in the source's dtype, since the scheme does not fit:", Listed(names)));
    }
  }

  void CheckFusedSets() {
    absl::flat_hash_map<std::string, std::vector<size_t>> sets;
    for (size_t i = 0; i < modules().size(); ++i) {
      if (!modules()[i].matrix.has_value()) continue;
      const std::string set = UniformSet(modules()[i].identity);
      if (set.empty()) continue;
      sets[set].push_back(i);
    }
    std::vector<std::pair<size_t, std::string>> lines;
    for (const auto& [set, members] : sets) {
      const quant::Scheme* const first = modules()[members.front()].scheme;
      if (std::all_of(members.begin(), members.end(), [&](size_t i) { return modules()[i].scheme == first; })) continue;
      std::map<std::string, std::vector<std::string>> by_scheme;
      for (size_t i : members) {
        const quant::Scheme* const scheme = modules()[i].scheme;
        by_scheme[scheme == nullptr ? "not quantized" : scheme->spec().ToString()].push_back(modules()[i].identity.module);
      }
      if (by_scheme.size() == 1) continue;
      std::vector<std::string> parts;
      for (const auto& [scheme, names] : by_scheme) {
        parts.push_back(absl::StrCat(absl::StrJoin(SummarizeNames(names), ", "), ": ", scheme));
      }
      lines.emplace_back(members.front(), absl::StrJoin(parts, "; "));
    }
    if (lines.empty()) return;
    std::sort(lines.begin(), lines.end());
    std::vector<std::string> texts;
    for (auto& [first, text] : lines) texts.push_back(std::move(text));
    problems_.push_back(absl::StrCat(
        "modules that inference engines use as one would differ in their scheme; target or ignore them together:", ListedLines(texts)));
  }

  void Warn(std::string text) { selection_.warnings.push_back(std::move(text)); }

  const checkpoint::Checkpoint& checkpoint_;
  const Recipe& recipe_;
  Selection selection_;
  std::vector<Candidate> candidates_;          // of modules
  std::vector<const quant::Scheme*> schemes_;  // of groups
  std::vector<Counted> ignores_;
  std::vector<std::vector<Counted>> targets_;  // of groups
  std::vector<std::string> problems_;
};

}  // namespace

std::string UnknownTypeWarning(const checkpoint::ModelConfig& config) {
  return absl::StrCat("model_type \"", config.model_type, "\" is not known: roles are guessed from the usual names");
}

absl::StatusOr<Selection> SelectModules(const checkpoint::Checkpoint& checkpoint, const Recipe& recipe) {
  return Selector(checkpoint, recipe).Run();
}

}  // namespace quern::daemon
