#include "daemon/planner/stack_experts.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"
#include "checkpoint/expert_stack.h"
#include "daemon/planner/module_names.h"

namespace quern::daemon {
namespace {

using checkpoint::ExpertStack;
using checkpoint::StackAxes;

// The experts of a layer.
struct Layer {
  std::map<std::string, std::map<uint32_t, size_t>>
      modules;  // by name behind the expert's number, then by expert: index into the selection
};

// A stack and the modules that fill it.
struct Filled {
  ExpertStack stack;
  StackAxes axes;
  std::vector<size_t> modules;  // experts in order; of each, the stack's names in order
};

bool IsFloat(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32; }

class ExpertStacker {
 public:
  ExpertStacker(const checkpoint::Family& family, const quant::Scheme* plain, Selection& selection)
      : family_(family), plain_(plain), selection_(selection), moved_(selection.modules.size()) {}

  void Run() {
    std::map<std::string, Layer> layers;  // by the path of the experts
    for (size_t m = 0; m < selection_.modules.size(); ++m) {
      const checkpoint::ModuleIdentity& identity = selection_.modules[m].identity;
      if (!identity.expert.has_value() || !selection_.modules[m].weight.has_value()) continue;
      const std::string& module = identity.module;
      const std::string number = absl::StrCat(".", *identity.expert, ".");
      const size_t leaf = module.rfind('.');
      if (leaf + 1 < number.size() || module.compare(leaf + 1 - number.size(), number.size(), number) != 0) continue;
      layers[module.substr(0, leaf + 1 - number.size())].modules[module.substr(leaf + 1)][*identity.expert] = m;
    }
    std::vector<std::string> apart;
    std::string why;
    for (const auto& [experts, layer] : layers) {
      std::vector<Filled> filled;
      const std::string problem = Fill(experts, layer, filled);
      if (problem.empty()) {
        for (const Filled& stack : filled) Place(stack);
        continue;
      }
      apart.push_back(experts);
      if (why.empty()) why = absl::StrCat(experts, ": ", problem);
    }
    if (!apart.empty()) {
      selection_.warnings.push_back(absl::StrCat("experts are written one by one, though loaders know those of ",
                                                 std::string(family_.name()), " only as one tensor a layer (", why, "):\n  ",
                                                 absl::StrJoin(SummarizeNames(apart), "\n  ")));
    }
    Reorder();
  }

 private:
  const SelectedModule& Module(size_t m) const { return selection_.modules[m]; }

  // Why the experts make no stacks, or empty. Without a rule for them there is nothing to fill.
  std::string Fill(const std::string& experts, const Layer& layer, std::vector<Filled>& filled) const {
    for (ExpertStack& stack : family_.StacksOf(experts)) {
      Filled entry{std::move(stack), {}, {}};
      const auto first = layer.modules.find(entry.stack.names.front());
      if (first == layer.modules.end()) return absl::StrCat("there is no ", entry.stack.names.front());
      entry.axes.experts = first->second.size();
      for (uint32_t expert = 0; expert < entry.axes.experts; ++expert) {
        for (const std::string& name : entry.stack.names) {
          const auto of_name = layer.modules.find(name);
          const size_t* const module = of_name == layer.modules.end() ? nullptr : FindOrNull(of_name->second, expert);
          if (module == nullptr) return absl::StrCat("there is no ", expert, ".", name);
          const SourceWeight& weight = *Module(*module).weight;
          const SourceWeight& model = *Module(entry.modules.empty() ? *module : entry.modules.front()).weight;
          if (weight.rows != model.rows || weight.cols != model.cols) return absl::StrCat(expert, ".", name, " has a shape of its own");
          if (!Module(*module).tensors.empty()) return absl::StrCat(expert, ".", name, " has tensors beside its weight");
          if (!IsFloat(weight.dtype)) return absl::StrCat(expert, ".", name, " holds no floating-point numbers");
          entry.modules.push_back(*module);
        }
      }
      const SourceWeight& weight = *Module(entry.modules.front()).weight;
      entry.axes.out = weight.rows * entry.stack.names.size();
      entry.axes.in = weight.cols;
      if (!filled.empty() && filled.front().axes.experts != entry.axes.experts)
        return "its projections are of different numbers of experts";
      filled.push_back(std::move(entry));
    }
    // Where a family has both orders, loaders turn a tensor over when its shape asks for it. That of a square one never does, and one layer
    // has one order.
    const bool square = std::any_of(filled.begin(), filled.end(), [](const Filled& entry) { return entry.axes.out == entry.axes.in; });
    for (Filled& entry : filled) entry.axes.transposed = entry.stack.transposed && (entry.stack.fixed || !square);
    return "";
  }

  static const size_t* FindOrNull(const std::map<uint32_t, size_t>& map, uint32_t key) {
    const auto found = map.find(key);
    return found == map.end() ? nullptr : &found->second;
  }

  void Place(const Filled& filled) {
    const StackAxes& axes = filled.axes;
    auto output = std::make_shared<StackedOutput>();
    output->tensor = filled.stack.tensor;
    output->module = filled.stack.base;
    output->block = filled.stack.experts;
    output->shape = {axes.experts, axes.transposed ? axes.in : axes.out, axes.transposed ? axes.out : axes.in};
    const size_t parts = filled.stack.names.size();
    for (size_t i = 0; i < filled.modules.size(); ++i) {
      SelectedModule& module = selection_.modules[filled.modules[i]];
      module.stack = output;
      module.slice = checkpoint::SliceOfStack(filled.stack, axes, i / parts, i % parts);
      if (module.scheme == nullptr) {
        module.scheme = plain_;
        module.dequantized = true;
        module.reason = absl::StrCat("stored as ", std::string(DTypeName(module.weight->dtype)));
      }
      moved_[filled.modules[i]] = true;
      order_.push_back(filled.modules[i]);
    }
  }

  void Reorder() {
    if (order_.empty()) return;
    std::vector<SelectedModule> modules;
    modules.reserve(selection_.modules.size());
    for (size_t m = 0; m < moved_.size(); ++m) {
      if (!moved_[m]) modules.push_back(std::move(selection_.modules[m]));
    }
    for (const size_t m : order_) modules.push_back(std::move(selection_.modules[m]));
    selection_.modules = std::move(modules);
  }

  const checkpoint::Family& family_;
  const quant::Scheme* const plain_;
  Selection& selection_;
  std::vector<bool> moved_;
  std::vector<size_t> order_;  // of those that are moved
};

}  // namespace

void StackExperts(const checkpoint::Family& family, const quant::Scheme* plain, Selection& selection) {
  ExpertStacker(family, plain, selection).Run();
}

}  // namespace quern::daemon
