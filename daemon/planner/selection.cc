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
#include "daemon/planner/shape_text.h"
#include "daemon/planner/stack_experts.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using checkpoint::RoleName;
using checkpoint::TensorInfo;

constexpr int kExamples = 3;
// Texts list whole models in few lines; what is longer than this helps nobody.
constexpr size_t kMaxListedLines = 100;

enum class Form {
  kMatrix,      // a 2-D weight that can be read: plain, in a quantized format, or a slice of a stack
  kUnreadable,  // a 2-D weight that cannot
  kStack,       // weights of several experts in one tensor that cannot be cut
  kOther,
};

struct Candidate {
  Form form = Form::kOther;
  bool linear = false;  // no default ignore covers it
  std::string default_reason;
};

std::string SidesText(const SourceWeight& weight) { return absl::StrCat("[", weight.rows, ", ", weight.cols, "]"); }

// Whether a weight of a model that nobody described has a row for each token. Names tell little there.
bool IsOfVocabulary(const SourceWeight& weight, const checkpoint::ModelConfig& config) {
  if (checkpoint::Family::For(config).known() || config.vocab_size != weight.rows) return false;
  return weight.rows != config.hidden_size && weight.rows != config.intermediate_size;
}

Candidate Classify(const SourceModule& module, const checkpoint::Checkpoint& checkpoint) {
  Candidate candidate;
  const Role role = module.identity.role;
  const auto first_shape = [&] { return ShapeText(checkpoint.tensors()[module.tensors.front()].info->shape); };
  if (module.is_stack) {
    candidate.form = Form::kStack;
    candidate.default_reason = absl::StrCat("a stack of experts in one tensor, shape ", first_shape());
  } else if (module.weight.has_value() && module.weight->elements() == 0) {
    candidate.default_reason = absl::StrCat("empty: shape ", SidesText(*module.weight));
  } else if (!module.weight.has_value() && module.unreadable.empty()) {
    const TensorInfo& first = *checkpoint.tensors()[module.tensors.front()].info;
    const char* what = first.shape.size() == 2 ? "not the .weight of a module: shape " : "not a 2-D weight: shape ";
    candidate.default_reason = absl::StrCat(role == Role::kNorms ? "norm, " : "", what, first_shape());
  } else {
    candidate.form = module.weight.has_value() ? Form::kMatrix : Form::kUnreadable;
    if (role == Role::kRouter || role == Role::kEmbeddings || role == Role::kLmHead || role == Role::kNorms) {
      candidate.default_reason = std::string(RoleName(role));
    } else if (role == Role::kOther && module.weight.has_value() && IsOfVocabulary(*module.weight, checkpoint.config())) {
      candidate.default_reason = absl::StrCat("an embedding or lm_head: as many rows as the vocabulary, ", module.weight->rows);
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

std::string ListedLines(const std::vector<std::string>& lines) {
  std::string text;
  for (size_t i = 0; i < lines.size() && i < kMaxListedLines; ++i) absl::StrAppend(&text, "\n  ", lines[i]);
  if (lines.size() > kMaxListedLines) absl::StrAppend(&text, "\n  and ", lines.size() - kMaxListedLines, " lines more");
  return text;
}

// A value that is written as plain one is rounded once.
void DecodeFor(DType dtype, SourceWeight& weight) {
  if (!weight.DecodesToAnyDType()) return;
  // Of what F16 cannot hold the place is named: products in F32 are asked for then, unless the scale is rounded first.
  const bool scale_first = weight.decoder->spec().convention == quant::Convention::kModelOpt && weight.decoder->spec().num_bits == 8;
  weight.dtype = dtype == DType::kF16 && !scale_first ? DType::kF32 : dtype;
}

// Values of a dtype as a scheme.
absl::StatusOr<const quant::Scheme*> PlainScheme(DType dtype) {
  QUERN_ASSIGN_OR_RETURN(const quant::SchemeSpec spec, quant::PlainSpec(dtype));
  return quant::Scheme::For(spec);
}

class Selector {
 public:
  Selector(const checkpoint::Checkpoint& checkpoint, const Recipe& recipe, bool allow_requantize)
      : checkpoint_(checkpoint), recipe_(recipe), allow_requantize_(allow_requantize) {}

  absl::StatusOr<Selection> Run() {
    QUERN_RETURN_IF_ERROR(LoadSchemes());
    QUERN_RETURN_IF_ERROR(GatherModules());
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
    QUERN_RETURN_IF_ERROR(StorePlain());
    CollapseStacks();
    for (const Counted& counted : ignores_) selection_.patterns.push_back(ToProto(counted, "ignore"));
    for (const auto& group : targets_) {
      for (const Counted& counted : group) selection_.patterns.push_back(ToProto(counted, "target"));
    }
    return std::move(selection_);
  }

 private:
  std::vector<SelectedModule>& modules() { return selection_.modules; }

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

  absl::Status GatherModules() {
    QUERN_ASSIGN_OR_RETURN(source_, GatherSourceModules(checkpoint_));
    selection_.strays = source_.strays;
    modules().reserve(source_.modules.size());
    candidates_.reserve(source_.modules.size());
    for (SourceModule& module : source_.modules) {
      candidates_.push_back(Classify(module, checkpoint_));
      // The names stay in source_ too: patterns and problems of stacks need them.
      modules().push_back({module.identity, module.weight, module.tensors, module.storage, nullptr, false, ""});
    }
    return absl::OkStatus();
  }

  bool Matches(const Pattern& pattern, size_t index) const {
    const SourceModule& module = source_.modules[index];
    const bool linear = candidates_[index].linear;
    return pattern.Matches(module.identity.module, module.identity.role, linear) ||
           (!module.stack_tensor.empty() && pattern.Matches(module.stack_tensor, module.identity.role, linear));
  }

  void Decide(size_t index) {
    SelectedModule& module = modules()[index];
    const Candidate& candidate = candidates_[index];
    const std::string& name = module.identity.module;
    const Counted* ignored = nullptr;
    for (Counted& counted : ignores_) {
      if (!Matches(*counted.pattern, index)) continue;
      ++counted.raw;
      counted.Add(name);
      if (ignored == nullptr) ignored = &counted;
    }
    int chosen = -1;
    for (size_t g = 0; g < targets_.size(); ++g) {
      for (Counted& counted : targets_[g]) {
        if (!Matches(*counted.pattern, index)) continue;
        ++counted.raw;
        if (ignored != nullptr) {
          ++counted.ignored;
          continue;
        }
        const Pattern::Kind kind = counted.pattern->kind();
        const bool outright = kind == Pattern::Kind::kExact || kind == Pattern::Kind::kRole;
        // Stacks that cannot be cut are matched like the linear weights that they hold, and refused below.
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
    std::map<std::string, std::vector<std::string>> unreadable, stacks;  // by the reason
    std::vector<std::string> copied_stacks, not_matrices, turned, integers;
    bool stored = false;
    for (size_t i = 0; i < modules().size(); ++i) {
      const SourceModule& module = source_.modules[i];
      const std::string& name = module.identity.module;
      const bool chosen = modules()[i].scheme != nullptr;
      const Form form = candidates_[i].form;
      if (form == Form::kUnreadable || form == Form::kStack) {
        if (module.described || (form == Form::kUnreadable && chosen)) {
          unreadable[module.unreadable].push_back(name);
        } else if (form == Form::kStack && chosen) {
          stacks[module.unreadable].push_back(name);
        } else if (form == Form::kStack) {
          copied_stacks.push_back(name);
        }
      }
      if (form == Form::kOther && chosen) not_matrices.push_back(name);
      if (chosen && StoredTransposed(module)) turned.push_back(name);
      if (form != Form::kMatrix || module.weight->decoder == nullptr) continue;
      stored = true;
      if (chosen && module.weight->decoder->spec().type == quant::NumberType::kInt) integers.push_back(name);
    }
    for (const auto& [why, names] : unreadable) {
      problems_.push_back(absl::StrCat("weights in a quantized format that cannot be read (", why, "):", Listed(names)));
    }
    if (!integers.empty() && !allow_requantize_) {
      problems_.push_back(absl::StrCat(
          "weights that are integers already would be quantized anew, and errors add up; take the checkpoint that they were made "
          "from, ignore them, or say --allow-requantize:",
          Listed(integers)));
    }
    if (!stacks.empty()) {
      const bool known = checkpoint::Family::For(checkpoint_.config()).known();
      for (const auto& [why, names] : stacks) {
        problems_.push_back(absl::StrCat(
            "stacks of experts in one tensor cannot be cut into experts for model_type \"", checkpoint_.config().model_type, "\" (", why,
            ")", known ? "" : "; whether gate and up are halves or alternate, and which axis is which, only the type tells",
            "; save the checkpoint with one 2-D tensor an expert, or ignore them:", Listed(names)));
      }
    }
    if (!turned.empty()) {
      const bool known = checkpoint::Family::For(checkpoint_.config()).transposed_linears();
      problems_.push_back(absl::StrCat(known ? absl::StrCat("weights of model_type \"", checkpoint_.config().model_type, "\" are")
                                             : "weights whose bias has an element for each of their columns, and not for each row, are",
                                       " stored as [in, out] (Conv1D in transformers). Engines read quantized ones as [out, in], and "
                                       "groups and scales would lie along the "
                                       "wrong axis; save the checkpoint with plain linear modules, or ignore them",
                                       known ? "" : ", and those of the same kind that are square", ":", Listed(turned)));
    }
    if (!not_matrices.empty()) {
      problems_.push_back(absl::StrCat("targets name modules without a 2-D weight:", Listed(not_matrices)));
    }
    if (!copied_stacks.empty()) {
      Warn(absl::StrCat("stacks of experts are copied as they are:", Listed(copied_stacks)));
    }
    if (!checkpoint_.config().quantization_config.empty() && !stored && unreadable.empty()) {
      Warn("the source's quantization_config is replaced: no module is stored in a quantized format");
    }
  }

  static std::string Listed(const std::vector<std::string>& names) { return ListedLines(SummarizeNames(names)); }
  // The set of modules that must be treated alike: an engine's fused set, or all routed experts of a layer.
  static std::string UniformSet(const checkpoint::ModuleIdentity& identity) {
    if (identity.expert.has_value()) {
      const std::string number = absl::StrCat(".", *identity.expert, ".");
      const size_t at = identity.module.rfind(number);
      if (at != std::string::npos) return identity.module.substr(0, at);
    }
    return identity.scale_set;
  }

  // Whether a plain weight that is a tensor of its own is [in, out]: by the family, or since its bias is as long as a row.
  bool StoredTransposed(const SourceModule& module) const {
    if (!module.weight.has_value() || module.weight->decoder != nullptr || module.stack.has_value()) return false;
    const Role role = module.identity.role;
    const bool linear = role != Role::kEmbeddings && role != Role::kLmHead;
    if (linear && checkpoint::Family::For(checkpoint_.config()).transposed_linears()) return true;
    const std::string bias = absl::StrCat(module.identity.module, ".bias");
    return std::any_of(module.tensors.begin(), module.tensors.end(), [&](size_t tensor) {
      const TensorInfo& info = *checkpoint_.tensors()[tensor].info;
      return info.name == bias && info.shape.size() == 1 && info.shape[0] == module.weight->cols && info.shape[0] != module.weight->rows;
    });
  }

  void KeepOrRefuseMisfits() {
    std::map<std::string, std::vector<std::string>> misfits;  // by shape and reason
    absl::flat_hash_map<std::string, std::string> kept_sets;  // set -> the module that does not fit
    std::vector<size_t> kept;
    struct Fit {
      const quant::Scheme* scheme;
      DType dtype;
      uint64_t rows, cols;
      auto operator<=>(const Fit&) const = default;
    };
    std::map<Fit, absl::Status> fits;
    for (size_t i = 0; i < modules().size(); ++i) {
      SelectedModule& module = modules()[i];
      if (module.scheme == nullptr || candidates_[i].form != Form::kMatrix) continue;
      const SourceWeight& weight = *module.weight;
      const Fit key{module.scheme, weight.dtype, weight.rows, weight.cols};
      auto found = fits.find(key);
      if (found == fits.end()) {
        const quant::Shape2D shape{static_cast<int64_t>(weight.rows), static_cast<int64_t>(weight.cols)};
        found = fits.emplace(key, module.scheme->CheckWeight(weight.dtype, shape)).first;
      }
      if (found->second.ok()) continue;
      const std::string why = absl::StrCat(SidesText(weight), ": ", found->second.message());
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
      if (!modules()[i].weight.has_value()) continue;
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
        const SelectedModule& module = modules()[i];
        by_scheme[module.scheme == nullptr ? absl::StrCat("not quantized (", module.reason, ")") : module.scheme->spec().ToString()]
            .push_back(module.identity.module);
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

  // What is stored in a quantized format and not quantized anew is written as plain values.
  absl::Status StorePlain() {
    QUERN_ASSIGN_OR_RETURN(const quant::Scheme* const plain, PlainScheme(DType::kBF16));
    std::vector<std::string> names;
    for (size_t i = 0; i < modules().size(); ++i) {
      SelectedModule& module = modules()[i];
      if (module.scheme != nullptr || !module.weight.has_value() || module.weight->decoder == nullptr) continue;
      module.scheme = plain;
      module.dequantized = true;
      DecodeFor(DType::kBF16, *module.weight);
      names.push_back(module.identity.module);
    }
    if (!names.empty()) {
      Warn(absl::StrCat("stored in a quantized format and not quantized anew, so written as BF16:", Listed(names)));
    }
    return absl::OkStatus();
  }

  void CollapseStacks() {
    std::vector<bool> gone(modules().size());
    std::vector<SelectedModule> whole;
    bool cut = false;
    for (const SourceStack& stack : source_.stacks) {
      if (std::any_of(stack.modules.begin(), stack.modules.end(), [&](size_t m) { return modules()[m].scheme != nullptr; })) {
        cut = true;
        continue;
      }
      for (size_t m : stack.modules) {
        gone[m] = true;
        // The first expert stands for all.
        if (modules()[m].identity.expert == 0u) selection_.unnamed.push_back(modules()[m].identity);
      }
      for (size_t tensor : stack.tensors) {
        SelectedModule& module = whole.emplace_back();
        module.identity =
            checkpoint::Family::For(checkpoint_.config()).Identify(checkpoint_.tensors()[tensor].info->name, checkpoint_.config());
        module.tensors = {tensor};
        module.reason = modules()[stack.modules.front()].reason;
      }
    }
    const absl::string_view note = checkpoint::Family::For(checkpoint_.config()).stack_note();
    if (cut && !note.empty()) Warn(std::string(note));
    if (whole.empty()) return;
    std::vector<SelectedModule> left;
    for (size_t i = 0; i < modules().size(); ++i) {
      if (!gone[i]) left.push_back(std::move(modules()[i]));
    }
    for (SelectedModule& module : whole) left.push_back(std::move(module));
    modules() = std::move(left);
  }

  void Warn(std::string text) { selection_.warnings.push_back(std::move(text)); }

  const checkpoint::Checkpoint& checkpoint_;
  const Recipe& recipe_;
  const bool allow_requantize_;
  SourceModules source_;
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

absl::StatusOr<Selection> SelectModules(const checkpoint::Checkpoint& checkpoint, const Recipe& recipe, bool allow_requantize) {
  return Selector(checkpoint, recipe, allow_requantize).Run();
}

absl::StatusOr<Selection> SelectStored(const checkpoint::Checkpoint& checkpoint, DType dtype) {
  QUERN_ASSIGN_OR_RETURN(const quant::Scheme* const plain, PlainScheme(dtype));
  QUERN_ASSIGN_OR_RETURN(SourceModules source, GatherSourceModules(checkpoint));
  const checkpoint::Family& family = checkpoint::Family::For(checkpoint.config());
  Selection selection;
  selection.strays = std::move(source.strays);
  std::vector<std::string> problems;
  bool any = false, cut = false;
  for (SourceModule& module : source.modules) {
    if (module.stack.has_value() && !source.stacks[*module.stack].quantized) continue;
    if (!module.unreadable.empty() && module.described) {
      problems.push_back(absl::StrCat(module.identity.module, ": ", module.unreadable));
    }
    SelectedModule selected{std::move(module.identity),
                            std::move(module.weight),
                            std::move(module.tensors),
                            std::move(module.storage),
                            nullptr,
                            false,
                            "not quantized"};
    if (selected.weight.has_value() && selected.weight->decoder != nullptr) {
      selected.scheme = plain;
      selected.dequantized = any = true;
      DecodeFor(dtype, *selected.weight);
      selected.reason = absl::StrCat("stored as ", selected.weight->decoder->spec().ToString());
      cut = cut || module.stack.has_value();
    }
    selection.modules.push_back(std::move(selected));
  }
  for (const SourceStack& stack : source.stacks) {
    if (stack.quantized) continue;
    for (size_t tensor : stack.tensors) {
      SelectedModule& module = selection.modules.emplace_back();
      module.identity = family.Identify(checkpoint.tensors()[tensor].info->name, checkpoint.config());
      module.tensors = {tensor};
      module.reason = "not quantized";
    }
  }
  if (!problems.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        checkpoint.directory(), ": weights in a quantized format that cannot be read:", ListedLines(SummarizeNames(problems))));
  }
  if (!any) {
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint.directory(), ": no weight is stored in a quantized format: there is nothing to dequantize"));
  }
  StackExperts(family, plain, selection);
  const bool apart = std::any_of(selection.modules.begin(), selection.modules.end(), [](const SelectedModule& module) {
    return module.identity.expert.has_value() && module.stack == nullptr;
  });
  if (cut && apart && !family.stack_note().empty()) selection.warnings.push_back(std::string(family.stack_note()));
  if (!family.known()) selection.warnings.push_back(UnknownTypeWarning(checkpoint.config()));
  return selection;
}

}  // namespace quern::daemon
