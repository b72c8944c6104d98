#include "daemon/planner/source_evidence.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/fingerprint.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/shard_layout.h"
#include "daemon/recipe/quantization_args.h"
#include "quant/numerics_version.h"

namespace quern::daemon {
namespace {

using quern::v1::PlanSummary;
using quern::v1::SourceFile;

checkpoint::FileFingerprint ToFingerprint(const SourceFile& file) {
  checkpoint::FileFingerprint fingerprint;
  fingerprint.size = file.size();
  fingerprint.mtime_ns = file.mtime_ns();
  fingerprint.inode = file.inode();
  fingerprint.header_sha256 = file.header_sha256();
  fingerprint.sample_digest = file.sample_digest();
  fingerprint.blob = file.blob();
  fingerprint.content_sha256 = file.content_sha256();
  return fingerprint;
}

// Files that the recipe needs are given, and those that are given are needed.
absl::Status CheckInputFiles(const quern::v1::QuantizeSpec& spec, const Recipe& recipe) {
  bool activations = false, importance = false;
  for (const RecipeGroup& group : recipe.groups) {
    if (HasStaticActivations(group.scheme)) {
      activations = true;
      if (spec.activation_scales().empty()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "scheme ", ShortName(group.scheme), " stores scales of activations, which only data can give: name a file of them (",
            "--activation-scales FILE), or take ", DataFreePreset(group.scheme), ", which needs none"));
      }
    }
    if (group.scheme.observer == quant::Observer::kImportance) {
      importance = true;
      if (spec.importance().empty()) {
        return absl::InvalidArgumentError(absl::StrCat("observer ", ObserverName(group.scheme.observer),
                                                       " weighs errors by E[x^2] of the input channels: name a file of them (--importance "
                                                       "FILE), or take ",
                                                       ObserverName(quant::Observer::kMse)));
      }
    }
  }
  if (!spec.activation_scales().empty() && !activations) {
    return absl::InvalidArgumentError("--activation-scales: no scheme of the recipe stores scales of activations (FP8 and NVFP4 do)");
  }
  if (!spec.importance().empty() && !importance) {
    return absl::InvalidArgumentError(
        absl::StrCat("--importance: no scheme of the recipe uses it; choose the observer ", ObserverName(quant::Observer::kImportance)));
  }
  return absl::OkStatus();
}

// A field with its length, so that no two lists of fields give the same text.
void AddField(absl::string_view field, std::string& text) { absl::StrAppend(&text, field.size(), ":", field, "\n"); }

// SHA-256 of config.json and the files copied beside the shards: they are part of the output, so a change in them is a change of the
// source.
absl::StatusOr<std::string> DigestOfTexts(const checkpoint::Checkpoint& checkpoint) {
  std::string text;
  AddField(checkpoint.config().text, text);
  for (const std::string& name : checkpoint.side_files()) {
    QUERN_ASSIGN_OR_RETURN(const std::string content, ReadFileToString(JoinPath(checkpoint.directory(), name)));
    AddField(name, text);
    AddField(Sha256Of(content), text);
  }
  return Sha256Of(text);
}

}  // namespace

absl::Status AddSourceFiles(const checkpoint::Checkpoint& checkpoint, const EvidenceOptions& options, PlanSummary& summary) {
  for (const checkpoint::Shard& shard : checkpoint.shards()) {
    SourceFile& file = *summary.add_source_files();
    file.set_path(shard.path);
    file.set_size(shard.size);
    file.set_header_sha256(shard.header.sha256);
    file.set_header_size(shard.header.data_start);
    if (!options.samples && !options.whole_content) continue;
    QUERN_ASSIGN_OR_RETURN(const checkpoint::FileFingerprint fingerprint, checkpoint::FingerprintFile(shard.path, options.whole_content));
    if (fingerprint.size != shard.size || fingerprint.header_sha256 != shard.header.sha256) {
      return absl::AbortedError(absl::StrCat(shard.path, " changed while it was planned from; run again when nothing writes to it"));
    }
    file.set_mtime_ns(fingerprint.mtime_ns);
    file.set_inode(fingerprint.inode);
    file.set_sample_digest(fingerprint.sample_digest);
    file.set_blob(fingerprint.blob);
    file.set_content_sha256(fingerprint.content_sha256);
  }
  return absl::OkStatus();
}

std::string IdentityOf(const PlanSummary& summary, absl::string_view what) {
  std::string text;
  AddField(what, text);
  AddField(summary.resolved_recipe(), text);
  AddField(absl::StrCat(summary.max_shard_size()), text);
  AddField(absl::StrCat(summary.numerics_version()), text);
  for (const SourceFile& file : summary.source_files()) {
    AddField(BaseName(file.path()), text);
    for (const std::string& field : {absl::StrCat(file.size()), absl::StrCat(file.mtime_ns()), absl::StrCat(file.inode())})
      AddField(field, text);
    AddField(file.header_sha256(), text);
    AddField(file.sample_digest(), text);
    AddField(file.blob(), text);
  }
  return Sha256Of(text);
}

RecipeShorthands ShorthandsOf(const quern::v1::QuantizeSpec& spec) {
  return {.scheme = spec.scheme(),
          .group_size = spec.group_size(),
          .observer = spec.observer(),
          .targets = {spec.targets().begin(), spec.targets().end()},
          .ignore = {spec.ignore().begin(), spec.ignore().end()}};
}

// Opens the source of a QuantizeSpec or DequantizeSpec and fills what the summary says of it.
template <class Spec>
absl::StatusOr<checkpoint::Checkpoint> OpenSource(const Spec& spec, bool with_fingerprints, PlanSummary& summary) {
  QUERN_ASSIGN_OR_RETURN(const std::string directory, checkpoint::ResolveSource(spec.source()));
  QUERN_ASSIGN_OR_RETURN(checkpoint::Checkpoint checkpoint, checkpoint::Checkpoint::Open(directory));
  summary.set_source(checkpoint.directory());
  summary.set_source_name(spec.source());
  summary.set_model_type(checkpoint.config().model_type);
  summary.set_max_shard_size(spec.max_shard_size() > 0 ? spec.max_shard_size() : kDefaultMaxShardSize);
  summary.set_numerics_version(quant::kNumericsVersion);
  QUERN_RETURN_IF_ERROR(
      AddSourceFiles(checkpoint, {.samples = with_fingerprints, .whole_content = with_fingerprints && spec.verify_source()}, summary));
  return checkpoint;
}

absl::StatusOr<QuantizeInputs> OpenQuantize(const quern::v1::QuantizeSpec& spec, bool with_fingerprints, PlanSummary& summary) {
  const std::string export_format = spec.export_format().empty() ? kCompressedTensors : spec.export_format();
  if (export_format != kCompressedTensors && export_format != kModelOpt) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown export format \"", export_format, "\"; known: ", kCompressedTensors, ", ", kModelOpt));
  }
  // The recipe first: a mistake in it is told without reading a file.
  QUERN_ASSIGN_OR_RETURN(Recipe recipe, ParseRecipe(spec.recipe(), ShorthandsOf(spec)));
  summary.set_resolved_recipe(recipe.ToYaml());
  summary.set_recipe_sha256(Sha256Of(summary.resolved_recipe()));
  QUERN_RETURN_IF_ERROR(CheckInputFiles(spec, recipe));
  if (export_format == kModelOpt) {
    for (RecipeGroup& group : recipe.groups) {
      QUERN_ASSIGN_OR_RETURN(group.scheme, quant::ToModelOpt(group.scheme));
      QUERN_RETURN_IF_ERROR(quant::CheckSupported(group.scheme));
    }
  }
  QUERN_ASSIGN_OR_RETURN(checkpoint::Checkpoint checkpoint, OpenSource(spec, with_fingerprints, summary));
  QUERN_ASSIGN_OR_RETURN(ModuleInputs module_inputs,
                         ModuleInputs::Open(spec.activation_scales(), spec.importance(), with_fingerprints, summary));
  if (with_fingerprints) {
    QUERN_ASSIGN_OR_RETURN(const std::string texts, DigestOfTexts(checkpoint));
    std::string what = absl::StrCat("quantize ", export_format, " ", HexDigest(texts));
    for (const SourceFile& file : summary.input_files()) absl::StrAppend(&what, " ", HexDigest(file.content_sha256()));
    if (spec.allow_requantize()) absl::StrAppend(&what, " requantize");
    summary.set_identity(IdentityOf(summary, what));
  }
  return QuantizeInputs{std::move(checkpoint), std::move(recipe), export_format, summary.max_shard_size(), std::move(module_inputs)};
}

absl::StatusOr<DequantizeInputs> OpenDequantize(const quern::v1::DequantizeSpec& spec, bool with_fingerprints, PlanSummary& summary) {
  const std::string name = spec.dtype().empty() ? "BF16" : spec.dtype();
  const absl::StatusOr<DType> dtype = ParseDType(name);
  if (!dtype.ok() || (*dtype != DType::kBF16 && *dtype != DType::kF16 && *dtype != DType::kF32)) {
    return absl::InvalidArgumentError(absl::StrCat("plain weights are BF16, F16 or F32, not \"", name, "\""));
  }
  QUERN_ASSIGN_OR_RETURN(checkpoint::Checkpoint checkpoint, OpenSource(spec, with_fingerprints, summary));
  if (with_fingerprints) {
    QUERN_ASSIGN_OR_RETURN(const std::string texts, DigestOfTexts(checkpoint));
    summary.set_identity(IdentityOf(summary, absl::StrCat("dequantize ", name, " ", HexDigest(texts))));
  }
  return DequantizeInputs{std::move(checkpoint), *dtype};
}

std::string IdentityDifference(const PlanSummary& stored, const PlanSummary& now) {
  std::vector<std::string> differences;
  const auto has_content = [](const SourceFile& file) { return !file.content_sha256().empty(); };
  if (std::any_of(now.source_files().begin(), now.source_files().end(), has_content) &&
      !std::all_of(stored.source_files().begin(), stored.source_files().end(), has_content)) {
    differences.push_back(
        "the earlier run recorded no digests of the whole source (it ran without --verify-source), so it cannot be compared");
  }
  absl::flat_hash_map<std::string, const SourceFile*> stored_files;
  for (const SourceFile& file : stored.source_files()) stored_files[BaseName(file.path())] = &file;
  for (const SourceFile& file : now.source_files()) {
    const std::string name = BaseName(file.path());
    const auto found = stored_files.find(name);
    if (found == stored_files.end()) {
      differences.push_back(absl::StrCat("source ", name, " is new"));
      continue;
    }
    const std::string difference = ToFingerprint(*found->second).DifferenceTo(ToFingerprint(file));
    if (!difference.empty()) differences.push_back(absl::StrCat("source ", name, " changed: ", difference));
    stored_files.erase(found);
  }
  for (const SourceFile& file : stored.source_files()) {
    const std::string name = BaseName(file.path());
    if (stored_files.contains(name)) differences.push_back(absl::StrCat("source ", name, " is gone"));
  }
  if (stored.resolved_recipe() != now.resolved_recipe()) {
    differences.push_back(absl::StrCat("recipe changed from\n", stored.resolved_recipe(), "to\n", now.resolved_recipe()));
  }
  if (stored.max_shard_size() != now.max_shard_size()) {
    differences.push_back(absl::StrCat("max_shard_size changed from ", FormatByteSize(stored.max_shard_size()), " to ",
                                       FormatByteSize(now.max_shard_size())));
  }
  if (stored.numerics_version() != now.numerics_version()) {
    differences.push_back(absl::StrCat("numerics version changed from ", stored.numerics_version(), " to ", now.numerics_version()));
  }
  if (differences.empty() && stored.identity() != now.identity()) {
    differences.push_back("the operation, its options, the source's config.json or a file copied beside the weights changed");
  }
  return absl::StrJoin(differences, "; ");
}

}  // namespace quern::daemon
