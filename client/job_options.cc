#include "client/job_options.h"

#include <CLI/CLI.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "base/utf8.h"
#include "client/exit_code.h"
#include "client/paths.h"

namespace quern::client {
namespace {

// A recipe is written by hand; anything larger is another file taken for one.
constexpr uint64_t kMaxRecipeSize = 4 * kMiB;

// An empty value would pass for an option that was not given.
std::string NotEmpty(const std::string& value) { return value.empty() ? "the value is empty" : ""; }

}  // namespace

std::vector<std::string> SplitPatterns(const std::vector<std::string>& values) {
  std::vector<std::string> patterns;
  for (const std::string& value : values) {
    absl::string_view rest = value;
    while (!rest.empty()) {
      const size_t comma = absl::StartsWith(rest, "re:") ? absl::string_view::npos : rest.find(',');
      const absl::string_view pattern = absl::StripAsciiWhitespace(rest.substr(0, comma));
      if (!pattern.empty()) patterns.emplace_back(pattern);
      rest = comma == absl::string_view::npos ? absl::string_view() : rest.substr(comma + 1);
      rest = absl::StripLeadingAsciiWhitespace(rest);
    }
  }
  return patterns;
}

absl::StatusOr<double> ParseFraction(const std::string& flag, const std::string& text) {
  absl::string_view number = text;
  const bool percent = absl::ConsumeSuffix(&number, "%");
  double value = 0;
  // Not a number is neither below nor above anything.
  if (!absl::SimpleAtod(number, &value) || !(value >= 0 && value <= (percent ? 100 : 1))) {
    return UsageError(absl::StrCat(flag, ": \"", text, "\" is neither a share such as 1% nor a fraction from 0 to 1"));
  }
  return percent ? value / 100 : value;
}

absl::StatusOr<uint64_t> ParseSizeOption(absl::string_view option, absl::string_view text) {
  absl::StatusOr<uint64_t> size = ParseByteSize(text);
  if (!size.ok()) return UsageError(absl::StrCat(option, ": ", size.status().message()));
  if (*size == 0) return UsageError(absl::StrCat(option, ": the size must be above 0"));
  return size;
}

void WorkerOptions::AddTo(CLI::App& app) {
  app.add_option("--memory", memory, "Memory for buffers, all workers together")->type_name("SIZE")->capture_default_str();
  app.add_option("--threads", threads, "Threads that compute (default: as many as there are CPUs)")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  app.add_option("--reader", reader, "How files are read: auto, direct, buffered or mmap")
      ->check(CLI::IsMember({"auto", "direct", "buffered", "mmap"}))
      ->type_name("MODE")
      ->capture_default_str();
}

absl::StatusOr<uint64_t> WorkerOptions::MemoryBytes() const {
  QUERN_ASSIGN_OR_RETURN(const uint64_t bytes, ParseSizeOption("--memory", memory));
  if (bytes >= kMinimumTaskMemory) return bytes;
  return UsageError(absl::StrCat("--memory: no task runs with less than ", FormatByteSize(kMinimumTaskMemory)));
}

void QuantizeOptions::AddTo(CLI::App& app, bool output) {
  app.add_option("source", source, "Checkpoint directory, or org/name[@revision] in the local Hugging Face cache")
      ->required()
      ->type_name("SRC");
  app.add_option("--scheme", scheme, "Preset such as W4A16_ASYM, FP8_DYNAMIC, NVFP4A16 or MXFP4A16")->check(NotEmpty)->type_name("NAME");
  app.add_option("--group-size", group_size, "Weights that share a scale, or \"channel\" for one scale a row")
      ->check(NotEmpty)
      ->type_name("N|channel");
  app.add_option("--observer", observer, "How scales are found: minmax, mse, nvfp4_sweep, or imatrix_mse (with --importance)")
      ->check(NotEmpty)
      ->type_name("NAME");
  app.add_option("--targets", targets,
                 "What is quantized: a role, an exact module name, a glob, or re:REGEX; Linear, every linear weight, where nothing else is "
                 "said. May be repeated; commas separate")
      ->check([](const std::string& value) { return SplitPatterns({value}).empty() ? "no pattern in \"" + value + "\"" : std::string(); })
      ->allow_extra_args(false)
      ->type_name("PATTERN");
  app.add_option("--ignore", ignore, "What is left alone; written like --targets and stronger than it")
      ->allow_extra_args(false)
      ->type_name("PATTERN");
  app.add_option("--recipe", recipe_file, "YAML recipe; the options above are applied on top of it")->check(NotEmpty)->type_name("FILE");
  app.add_option("--max-shard-size", max_shard_size, "Largest file of the output")->type_name("SIZE")->capture_default_str();
  app.add_option("--export", export_format, "Format of the result")
      ->check(CLI::IsMember({"compressed-tensors", "modelopt"}))
      ->type_name("FORMAT")
      ->capture_default_str();
  app.add_option("--activation-scales", activation_scales,
                 "Safetensors file with the largest magnitude of each module's input activations, for FP8 and NVFP4 with static scales")
      ->check(NotEmpty)
      ->type_name("FILE");
  app.add_option("--importance", importance, "Safetensors file with E[x^2] of each module's input channels, for the observer imatrix_mse")
      ->check(NotEmpty)
      ->type_name("FILE");
  app.add_flag("--allow-requantize", allow_requantize, "Also quantize weights that are stored in 4-bit integers already");
  if (!output) return;
  app.add_flag("--overwrite", overwrite, "Replace a result of Quern that is in the output, or a job that was begun with other options");
  app.add_flag("--verify-source", verify_source, "Hash all of the source before the start, not only samples of it");
}

bool QuantizeOptions::SaysHow() const {
  for (const std::string* text : {&scheme, &group_size, &observer, &recipe_file, &activation_scales, &importance}) {
    if (!text->empty()) return true;
  }
  return !targets.empty() || !ignore.empty() || allow_requantize || export_format != "compressed-tensors";
}

absl::StatusOr<quern::v1::QuantizeSpec> QuantizeOptions::ToSpec(bool remote) const {
  quern::v1::QuantizeSpec spec;
  if (scheme.empty() && recipe_file.empty()) return UsageError("one of --scheme and --recipe is needed");
  if (!group_size.empty() && group_size != "channel") {
    uint32_t number;
    if (!absl::SimpleAtoi(group_size, &number) || number == 0) {
      return UsageError(absl::StrCat("--group-size: \"", group_size, "\" is neither a number above 0 nor \"channel\""));
    }
  }
  QUERN_ASSIGN_OR_RETURN(const uint64_t shard_size, ParseSizeOption("--max-shard-size", max_shard_size));
  QUERN_ASSIGN_OR_RETURN(*spec.mutable_source(), ResolveSource(source, remote));
  if (!recipe_file.empty()) {
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_recipe(), ReadFileToString(recipe_file, kMaxRecipeSize));
    if (spec.recipe().empty()) return absl::InvalidArgumentError(absl::StrCat("the recipe ", recipe_file, " is empty"));
    if (!IsValidUtf8(spec.recipe())) return UsageError(absl::StrCat("--recipe: ", recipe_file, " is no text in UTF-8"));
  }
  spec.set_scheme(scheme);
  spec.set_group_size(group_size);
  for (std::string& pattern : SplitPatterns(targets)) spec.add_targets(std::move(pattern));
  for (std::string& pattern : SplitPatterns(ignore)) spec.add_ignore(std::move(pattern));
  spec.set_max_shard_size(shard_size);
  spec.set_overwrite(overwrite);
  spec.set_verify_source(verify_source);
  spec.set_observer(observer);
  spec.set_export_format(export_format);
  spec.set_allow_requantize(allow_requantize);
  if (!activation_scales.empty()) {
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_activation_scales(), ResolveFile("--activation-scales", activation_scales, remote));
  }
  if (!importance.empty()) {
    QUERN_ASSIGN_OR_RETURN(*spec.mutable_importance(), ResolveFile("--importance", importance, remote));
  }
  return spec;
}

void DequantizeOptions::AddTo(CLI::App& app) {
  app.add_option("source", source, "Quantized checkpoint directory, or org/name[@revision] in the local Hugging Face cache")
      ->required()
      ->type_name("DIR");
  app.add_option("--dtype", dtype, "Of the weights that were quantized: bf16, f16 or f32; others keep theirs")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}, CLI::ignore_case))
      ->type_name("D")
      ->capture_default_str();
  app.add_option("--max-shard-size", max_shard_size, "Largest file of the output")->type_name("SIZE")->capture_default_str();
  app.add_flag("--overwrite", overwrite, "Replace a result of Quern that is in the output, or a job that was begun with other options");
  app.add_flag("--verify-source", verify_source, "Hash all of the source before the start, not only samples of it");
}

absl::StatusOr<quern::v1::DequantizeSpec> DequantizeOptions::ToSpec(bool remote) const {
  quern::v1::DequantizeSpec spec;
  QUERN_ASSIGN_OR_RETURN(const uint64_t shard_size, ParseSizeOption("--max-shard-size", max_shard_size));
  QUERN_ASSIGN_OR_RETURN(*spec.mutable_source(), ResolveSource(source, remote));
  spec.set_dtype(absl::AsciiStrToUpper(dtype));
  spec.set_max_shard_size(shard_size);
  spec.set_overwrite(overwrite);
  spec.set_verify_source(verify_source);
  return spec;
}

}  // namespace quern::client
