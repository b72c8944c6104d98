// The tables of families: what checkpoint/family.cc looks names up in. Private to this room; docs/families.md says how to add one.
#ifndef QUERN_CHECKPOINT_FAMILY_TABLE_H_
#define QUERN_CHECKPOINT_FAMILY_TABLE_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/expert_stack.h"
#include "checkpoint/family.h"

namespace quern::checkpoint {

// The modules of a layer whose name behind "layers.N." is `pattern`; "#" stands for the number of an expert.
struct ModuleRule {
  absl::string_view pattern;
  Role role;
  // Modules of a layer with the same `matrix` are one matrix in an engine, under one scale: q/k/v, gate/up. May hold "#".
  absl::string_view matrix = "";
  // Modules of a layer with the same `block` lie in one shard, such as an expert's three. May hold "#"; empty: `matrix`.
  absl::string_view block = "";
};

// Modules by the last parts of their names, wherever they stand: for models that nobody described. A "*" at an end
// of a part of the pattern stands for anything, a part "#" is the number of an expert; "^" in front: the pattern is the whole name.
struct NameRule {
  absl::string_view pattern;
  Role role;
  // As in ModuleRule, below the module's parent: q, k and v of one parent have the same one.
  absl::string_view matrix = "";
};

// A tensor of a layer that holds all experts.
struct StackRule {
  absl::string_view pattern;  // the tensor's name behind "layers.N.", without ".weight"
  ExpertStack::Holds holds;
  // Whether the family stores [E, in, out]. Where `fixed`, always; else only where the shape fits both ways.
  bool transposed = false;
  bool fixed = false;
  bool interleaved = false;  // kGateUp: gate and up alternate; else gate comes first, then up
  ExpertStack::Form form = ExpertStack::Form::kValues;
  // Expert e's modules are "<experts>.<e>.<name>".
  absl::string_view experts;
  // What the tensor's name has behind the pattern in a checkpoint: ".weight" or nothing.
  absl::string_view ending = "";
};

// How a family names an expert's projections.
struct ExpertNames {
  absl::string_view gate = "gate_proj";
  absl::string_view up = "up_proj";
  absl::string_view down = "down_proj";
};

// transformers replaces `from` in a module's name by `to` as it loads. A `from` that begins or ends with '.' matches whole components:
// names are looked at with a '.' on both sides.
struct Rename {
  absl::string_view from;
  absl::string_view to;
};

struct FamilyRules {
  absl::string_view name;
  absl::Span<const absl::string_view> model_types;
  absl::Span<const absl::Span<const ModuleRule>> modules;  // the first rule that matches wins
  absl::Span<const absl::Span<const StackRule>> stacks;
  ExpertNames experts;
  absl::Span<const Rename> renames;  // each applied once, in order
  // What a plan says where it cuts this family's stacks of experts.
  absl::string_view stack_note;
  // Whether loaders know the experts as stacks of plain values only, those of the first list, and not one by one.
  bool only_stacks = false;
  absl::Span<const NameRule> names = {};  // for what no rule of `modules` describes; the first that matches wins
  // Whether weights of linear modules are stored as [in, out].
  bool transposed_linears = false;
};

absl::Span<const FamilyRules> AllFamilies();
// A model of an unknown type: whatever has the usual names.
const FamilyRules& GenericFamily();

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_FAMILY_TABLE_H_
