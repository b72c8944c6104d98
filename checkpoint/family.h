// Families of models as data: which role each module of a checkpoint plays.
#ifndef QUERN_CHECKPOINT_FAMILY_H_
#define QUERN_CHECKPOINT_FAMILY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/expert_stack.h"
#include "checkpoint/model_config.h"

namespace quern::checkpoint {

struct FamilyRules;  // checkpoint/family_table.h

// Every tensor has exactly one.
enum class Role {
  kRoutedExperts,
  kSharedExperts,
  kAttention,
  kMlp,
  kRouter,
  kEmbeddings,
  kLmHead,
  kNorms,
  kMtp,
  kVision,
  kOther,
};

absl::string_view RoleName(Role role);  // "routed_experts", ...
std::optional<Role> ParseRole(absl::string_view name);

struct ModuleIdentity {
  std::string module;     // the tensor's name without ".weight", ".bias" and the like
  std::string parameter;  // what was taken off, "weight" for "x.weight"; for stacks without suffix empty
  Role role = Role::kOther;
  std::optional<uint32_t> layer;
  std::optional<uint32_t> expert;
  // Modules that an inference engine fuses, or that one expert consists of, have the same set and are never cut apart; empty: alone.
  // Example: "model.layers.3.self_attn.qkv", "model.layers.3.mlp.experts.17".
  std::string fused_set;
  // Modules that an engine loads as one matrix under one scale, so that they share scheme and global scale; empty: alone. Of an expert
  // that is gate and up and not down: "model.layers.3.mlp.experts.17.gate_up".
  std::string scale_set;
  // The name transformers gives the module at load where it differs from the file's ("mlp.shared_expert." -> "mlp.shared_experts."), else
  // empty.
  std::string transformers_name;
};

// Whether a parameter only says how a module's weight is stored, or its activations were to be: "weight_scale".
bool IsStorageParameter(absl::string_view parameter);
// Of these, what bitsandbytes stores beside the weight: "SCB", "weight.absmax".
bool IsBitsandbytesParameter(absl::string_view parameter);

class Family {
 public:
  // The table's entry for config.model_type, else for the outer one; a generic family of plain 2-D linears when the type is not known.
  static const Family& For(const ModelConfig& config);
  static std::vector<std::string> KnownModelTypes();

  absl::string_view name() const { return name_; }
  bool known() const { return known_; }
  // Never fails: what no rule describes is kOther.
  ModuleIdentity Identify(absl::string_view tensor_name, const ModelConfig& config) const;
  // What a tensor with the weights of all experts of a layer holds; nullopt where the family describes none of that name.
  std::optional<ExpertStack> FindStack(absl::string_view tensor_name) const;
  // The tensors with plain values that hold the experts of a layer, whose modules are "<experts>.<e>.<name>", where loaders know them in
  // this form only; else, or where no rule fits, empty.
  std::vector<ExpertStack> StacksOf(absl::string_view experts) const;
  // Whether linear modules store their weights as [in, out] (Conv1D in transformers), where engines and formats want [out, in].
  bool transposed_linears() const;
  // What a plan says where it cuts stacks of this family into experts; mostly empty.
  absl::string_view stack_note() const;

 private:
  friend class FamilyRegistry;
  // Fills in what the name of a module says that no rule of a layer describes.
  void FindByName(ModuleIdentity* identity) const;
  std::string name_;
  bool known_ = false;
  // Data of the family; see family_table.h and docs/families.md for how to add one.
  const FamilyRules* rules_ = nullptr;
};

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_FAMILY_H_
