#include "client/plan_report.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/byte_size.h"
#include "base/task_memory.h"
#include "client/human.h"
#include "client/tables.h"

namespace quern::client {
namespace {

using google::protobuf::RepeatedPtrField;
using quern::v1::TensorFate;

constexpr char kHole = '\0';  // stands for a number in the template of a name

std::string FateName(TensorFate::Fate fate) { return absl::AsciiStrToLower(TensorFate::Fate_Name(fate)); }

std::string FormatShape(const TensorFate& fate) { return absl::StrCat("[", absl::StrJoin(fate.shape(), ", "), "]"); }

// Splits off the dot-separated parts of a name that are numbers.
std::string NameTemplate(absl::string_view name, std::vector<uint64_t>& numbers) {
  std::vector<std::string> parts;
  for (absl::string_view part : absl::StrSplit(name, '.')) {
    uint64_t number;
    // "007" must not become 7.
    if (absl::SimpleAtoi(part, &number) && absl::StrCat(number) == part) {
      numbers.push_back(number);
      parts.emplace_back(1, kHole);
    } else {
      parts.emplace_back(part);
    }
  }
  return absl::StrJoin(parts, ".");
}

std::string FillTemplate(absl::string_view text, const std::vector<std::vector<uint64_t>>& numbers) {
  std::string name;
  size_t hole = 0;
  for (const char c : text) {
    if (c != kHole) {
      name += c;
      continue;
    }
    const std::string ranges = FormatRanges(numbers[hole++]);
    const bool one = ranges.find_first_not_of("0123456789") == std::string::npos;
    absl::StrAppend(&name, one ? ranges : absl::StrCat("{", ranges, "}"));
  }
  return name;
}

std::string FormatBytes(uint64_t bytes) { return absl::StrCat(FormatCount(bytes), " B"); }

void AppendSection(std::string* text, absl::string_view title, const Table& table) {
  if (!table.empty()) absl::StrAppend(text, "\n", title, "\n", table.ToString(2));
}

Table FatesTable(const RepeatedPtrField<TensorFate>& fates, bool all) {
  Table table({{"TENSOR"}, {"COUNT", kRight}, {"DTYPE"}, {"SHAPE"}, {"FATE"}, {"SCHEME"}, {"ROLE"}, {"REASON"}});
  const auto add = [&](const std::string& name, uint64_t count, const std::string& shape, const TensorFate& fate) {
    table.AddRow({name, FormatCount(count), fate.dtype(), shape, FateName(fate.fate()), fate.scheme(), fate.role(), fate.reason()});
  };
  if (all) {
    for (const TensorFate& fate : fates) add(fate.tensor(), 1, FormatShape(fate), fate);
  } else {
    for (const FateGroup& group : GroupFates(fates)) add(group.name, group.count, group.shape, group.first);
  }
  return table;
}

// What is quantized in each scheme, in the order of the tensors.
Table SchemesTable(const RepeatedPtrField<TensorFate>& fates) {
  struct Sum {
    std::string scheme;
    uint64_t modules = 0;
    uint64_t weights = 0;
    std::vector<std::string> reasons;  // the targets that chose it
  };
  std::vector<Sum> sums;
  std::map<std::string, size_t> index;
  for (const TensorFate& fate : fates) {
    if (fate.fate() != TensorFate::QUANTIZED) continue;
    const auto [at, added] = index.emplace(fate.scheme(), sums.size());
    if (added) sums.push_back({fate.scheme(), 0, 0, {}});
    Sum& sum = sums[at->second];
    ++sum.modules;
    uint64_t weights = 1;
    for (const uint64_t dimension : fate.shape()) weights *= dimension;
    sum.weights += weights;
    if (std::find(sum.reasons.begin(), sum.reasons.end(), fate.reason()) == sum.reasons.end()) sum.reasons.push_back(fate.reason());
  }
  Table table({{"SCHEME"}, {"MODULES", kRight}, {"WEIGHTS", kRight}, {"CHOSEN BY"}});
  for (const Sum& sum : sums) {
    table.AddRow({sum.scheme, FormatCount(sum.modules), FormatCount(sum.weights), absl::StrJoin(sum.reasons, ", ")});
  }
  return table;
}

// "compressed-tensors mixed-precision", "modelopt W4A16_NVFP4"; empty when there is no config.
std::string FormatOf(const std::string& quantization_config) {
  const nlohmann::json config = nlohmann::json::parse(quantization_config, nullptr, /*allow_exceptions=*/false);
  std::vector<std::string> words;
  for (const char* key : {"quant_method", "format", "quant_algo"}) {
    if (config.is_object() && config.contains(key) && config[key].is_string()) words.push_back(config[key].get<std::string>());
  }
  return absl::StrJoin(words, " ");
}

}  // namespace

std::vector<FateGroup> GroupFates(const RepeatedPtrField<TensorFate>& fates) {
  using Key = std::tuple<std::string, int, std::string, std::string, std::string, std::string>;
  struct Building {
    FateGroup group;
    std::vector<std::vector<uint64_t>> numbers;
  };
  std::map<Key, size_t> index;
  std::vector<std::pair<std::string, Building>> building;
  for (const TensorFate& fate : fates) {
    std::vector<uint64_t> numbers;
    const std::string text = NameTemplate(fate.tensor(), numbers);
    const auto [at, added] =
        index.emplace(Key(text, fate.fate(), fate.reason(), fate.scheme(), fate.role(), fate.dtype()), building.size());
    if (added) {
      Building one;
      one.group.first = fate;
      one.group.shape = FormatShape(fate);
      one.numbers.resize(numbers.size());
      building.emplace_back(text, std::move(one));
    }
    Building& one = building[at->second].second;
    ++one.group.count;
    if (one.group.shape != FormatShape(fate)) one.group.shape = "various";
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (one.numbers[i].empty() || one.numbers[i].back() != numbers[i]) one.numbers[i].push_back(numbers[i]);
    }
  }
  std::vector<FateGroup> groups;
  for (auto& [text, one] : building) {
    one.group.name = FillTemplate(text, one.numbers);
    groups.push_back(std::move(one.group));
  }
  return groups;
}

std::string FormatPlan(const quern::v1::PlanJobResponse& plan, bool all) {
  const quern::v1::PlanSummary& summary = plan.summary();
  std::string text = absl::StrCat("source  ", summary.source(), "\n        ", summary.model_type(), ", ",
                                  FormatCount(summary.source_files_size()), " files, ", FormatBytes(summary.source_bytes()), "\n");
  if (const std::string format = FormatOf(summary.quantization_config()); !format.empty()) absl::StrAppend(&text, "format  ", format, "\n");

  Table patterns({{"KIND"}, {"PATTERN"}, {"SCHEME"}, {"MATCHES", kRight}, {"FOR EXAMPLE"}});
  for (const auto& pattern : summary.patterns()) {
    patterns.AddRow({pattern.kind(), pattern.pattern(), pattern.scheme(), FormatCount(pattern.matches()),
                     pattern.examples_size() > 0 ? pattern.examples(0) : ""});
  }
  AppendSection(&text, "What the patterns matched", patterns);
  AppendSection(&text, "Schemes", SchemesTable(plan.fates()));
  AppendSection(&text,
                absl::StrCat("What becomes of the tensors (", FormatCount(summary.quantized_tensors()), " quantized, ",
                             FormatCount(summary.copied_tensors()), " copied, ", FormatCount(summary.dropped_size()), " dropped)"),
                FatesTable(plan.fates(), all));

  Table shards({{"TASK", kRight}, {"FILE"}, {"LAYERS"}, {"TENSORS", kRight}, {"SIZE", kRight}});
  for (int i = 0; i < summary.shards_size(); ++i) {
    const auto& shard = summary.shards(i);
    shards.AddRow({absl::StrCat(i), shard.file(), FormatRanges({shard.layers().begin(), shard.layers().end()}),
                   FormatCount(shard.tensors()), FormatBytes(shard.size())});
  }
  shards.AddRow({"", "sum", "", "", FormatBytes(summary.output_bytes())});
  AppendSection(&text, "What is written", shards);

  Table bits({{"ROLE"}, {"WEIGHTS", kRight}, {"BITS PER WEIGHT", kRight}});
  for (const auto& role : summary.effective_bits()) {
    bits.AddRow({role.role().empty() ? "whole model" : role.role(), FormatCount(role.weights()), absl::StrFormat("%.3f", role.bits())});
  }
  AppendSection(&text, "Effective bits, scales counted", bits);

  absl::StrAppend(&text, "\npeak memory    ", FormatByteSize(summary.peak_memory()), " of buffers (at least ",
                  FormatLeastMemory(summary.minimum_memory()), ")\n", "disk needed    ", FormatByteSize(summary.disk_needed()), "\n");
  for (const std::string& warning : summary.warnings()) absl::StrAppend(&text, "warning: ", warning, "\n");
  return text;
}

std::string FormatInspection(const quern::v1::InspectCheckpointResponse& response) {
  std::string text = absl::StrCat(
      response.path(), "\n", response.model_type(), ", ", FormatCount(response.files()), " files, ", FormatBytes(response.bytes()), ", ",
      FormatCount(response.tensors()), " tensors, ", FormatCount(response.parameters()), " parameters\n",
      response.quantization().empty() ? "not quantized" : absl::StrCat("quantized: ", response.quantization()), "\n");
  const auto section = [&](const char* title, const auto& groups) {
    Table table({{title}, {"TENSORS", kRight}, {"PARAMETERS", kRight}, {"SIZE", kRight}});
    for (const auto& group : groups) {
      table.AddRow({group.key(), FormatCount(group.tensors()), FormatCount(group.parameters()), FormatByteSize(group.bytes())});
    }
    if (!table.empty()) absl::StrAppend(&text, "\n", table.ToString());
  };
  section("LAYER", response.layers());
  section("ROLE", response.roles());
  section("DTYPE", response.dtypes());
  for (const std::string& warning : response.warnings()) absl::StrAppend(&text, "warning: ", warning, "\n");
  return text;
}

}  // namespace quern::client
