#include "checkpoint/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/file_roots.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "checkpoint/hub_cache.h"

namespace quern::checkpoint {
namespace {

constexpr absl::string_view kConfigName = "config.json";
constexpr absl::string_view kIndexName = "model.safetensors.index.json";
constexpr absl::string_view kSingleShardName = "model.safetensors";
constexpr absl::string_view kShardSuffix = ".safetensors";
constexpr absl::string_view kTemplateDirectory = "additional_chat_templates";
constexpr uint64_t kMaxConfigBytes = 16 * kMiB;
constexpr uint64_t kMaxIndexBytes = 256 * kMiB;

// Files that a loader or a user of the model needs beside the weights. A '*' stands at the beginning or at the end.
constexpr absl::string_view kCopied[] = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.py",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "README*",
};

// Files that are known and left behind, with the reason.
constexpr std::pair<absl::string_view, absl::string_view> kSkipped[] = {
    {"*.index.json", "index, written anew"},
    {"hf_quant_config.json", "describes the quantization of the source"},
    {"quantize_config.json", "describes the quantization of the source"},
    {"recipe.yaml", "describes the quantization of the source"},
    {"consolidated*", "the weights in another format"},
    {"adapter_*", "adapter"},
    {"*.bin", "weights in another format"},
    {"*.pt", "weights in another format"},
    {"*.pth", "weights in another format"},
    {"*.msgpack", "weights in another format"},
    {"*.h5", "weights in another format"},
    {"*.onnx", "weights in another format"},
    {"*.gguf", "weights in another format"},
};

bool MatchesName(absl::string_view pattern, absl::string_view name) {
  if (absl::ConsumePrefix(&pattern, "*")) return absl::EndsWith(name, pattern);
  if (absl::ConsumeSuffix(&pattern, "*")) return absl::StartsWith(name, pattern);
  return pattern == name;
}

bool IsDirectory(const std::string& path) {
  struct stat info;
  return ConfinedStat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

bool IsRegularFile(const std::string& path) {
  struct stat info;
  return ConfinedStat(path, &info) == 0 && S_ISREG(info.st_mode);
}

// Without following links: names of a Hugging Face cache are taken from the links.
std::string AbsolutePath(absl::string_view path) {
  std::error_code error;
  std::filesystem::path absolute = std::filesystem::absolute(std::filesystem::path(path.begin(), path.end()), error).lexically_normal();
  std::string text = absolute.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

// The one name in `names` that ends with `suffix`, or empty.
std::string OnlyNameWithSuffix(const std::vector<std::string>& names, absl::string_view suffix) {
  std::string found;
  for (const std::string& name : names) {
    if (!absl::EndsWith(name, suffix) || absl::StartsWith(name, "consolidated") || absl::StartsWith(name, "adapter_")) continue;
    if (!found.empty()) return "";
    found = name;
  }
  return found;
}

std::set<std::string> ShardNames(const ShardIndex& index) {
  std::set<std::string> names;
  for (const auto& [tensor, file] : index.weight_map) names.insert(file);
  return names;
}

// Which files hold the weights.
struct Layout {
  std::set<std::string> shard_names;
  ShardIndex index;
  std::string index_name;  // empty without an index
  bool stale_index = false;
};

absl::StatusOr<Layout> FindLayout(const std::string& directory, const std::vector<std::string>& names) {
  const auto exists = [&](absl::string_view name) { return std::binary_search(names.begin(), names.end(), name); };
  Layout layout;
  if (exists(kIndexName)) {
    layout.index_name = std::string(kIndexName);
  } else if (!exists(kSingleShardName)) {
    layout.index_name = OnlyNameWithSuffix(names, ".safetensors.index.json");
  }
  if (!layout.index_name.empty()) {
    const std::string path = JoinPath(directory, layout.index_name);
    QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, kMaxIndexBytes));
    QUERN_ASSIGN_OR_RETURN(layout.index, ParseShardIndex(text, path));
    layout.shard_names = ShardNames(layout.index);
    if (layout.shard_names.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map is empty"));
    const bool none_exists = std::none_of(layout.shard_names.begin(), layout.shard_names.end(), exists);
    if (!none_exists || !exists(kSingleShardName)) return layout;
    // Left behind when the checkpoint was saved again in one file.
    layout = Layout();
    layout.stale_index = true;
  }
  const std::string single = exists(kSingleShardName) ? std::string(kSingleShardName) : OnlyNameWithSuffix(names, kShardSuffix);
  if (single.empty()) {
    return absl::NotFoundError(absl::StrCat(directory, " holds neither ", kIndexName, " nor ", kSingleShardName,
                                            " nor exactly one other *.safetensors file: this is no checkpoint that can be read"));
  }
  layout.shard_names.insert(single);
  return layout;
}

absl::StatusOr<std::string> ReadConfig(const std::string& directory) {
  const std::string path = JoinPath(directory, kConfigName);
  absl::StatusOr<std::string> text = ReadFileToString(path, kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat(directory, " holds no ", kConfigName, ": this is no Hugging Face checkpoint"));
  }
  return text;
}

// Sorts the files that are no shards into those to copy and those to leave, the latter with the reason.
absl::Status SortFiles(const std::string& directory, const std::vector<std::string>& names, const Layout& layout,
                       std::vector<std::string>* copied, std::vector<std::pair<std::string, std::string>>* skipped) {
  for (const std::string& name : names) {
    if (name == kConfigName || layout.shard_names.count(name) > 0) continue;
    const std::string path = JoinPath(directory, name);
    if (IsDirectory(path)) {
      if (name != kTemplateDirectory) {
        skipped->emplace_back(name, "directory");
        continue;
      }
      QUERN_ASSIGN_OR_RETURN(const std::vector<std::string> templates, ListDirectory(path));
      for (const std::string& file : templates) {
        if (IsRegularFile(JoinPath(path, file))) {
          copied->push_back(JoinPath(name, file));
        } else {
          skipped->emplace_back(JoinPath(name, file), "no regular file");
        }
      }
      continue;
    }
    const auto reason =
        std::find_if(std::begin(kSkipped), std::end(kSkipped), [&](const auto& rule) { return MatchesName(rule.first, name); });
    if (!IsRegularFile(path)) {
      skipped->emplace_back(name, "no regular file, or a link to nothing");
    } else if (name == kIndexName && layout.stale_index) {
      skipped->emplace_back(name, "stale: no file that it names exists");
    } else if (reason != std::end(kSkipped)) {
      skipped->emplace_back(name, std::string(reason->second));
    } else if (absl::EndsWith(name, kShardSuffix)) {
      skipped->emplace_back(name, layout.index_name.empty()
                                      ? absl::StrCat("not the shard of this checkpoint, which is ", *layout.shard_names.begin())
                                      : absl::StrCat("not named by ", layout.index_name));
    } else if (std::any_of(std::begin(kCopied), std::end(kCopied), [&](absl::string_view pattern) { return MatchesName(pattern, name); })) {
      copied->push_back(name);
    } else {
      skipped->emplace_back(name, "not a file that loaders of the model need");
    }
  }
  std::sort(copied->begin(), copied->end());
  return absl::OkStatus();
}

absl::Status ProblemsToStatus(absl::string_view directory, const std::vector<std::string>& problems) {
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(directory, ": ", problems.size(), problems.size() == 1 ? " problem" : " problems", ":\n  ",
                                                 absl::StrJoin(problems, "\n  ")));
}

// Names go into JSON and into messages of the protocol, which hold UTF-8 only.
absl::Status CheckName(absl::string_view directory, absl::string_view name) {
  if (IsValidUtf8(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(directory, ": the name of the file \"", EscapeUnlessUtf8(name),
                                                 "\" is no UTF-8, so the output could not list it; rename the file or move it away"));
}

std::string Environment(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

bool IsRepositoryPart(absl::string_view part) {
  return !part.empty() && part[0] != '.' &&
         std::all_of(part.begin(), part.end(), [](unsigned char c) { return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.'; });
}

// "org/name" or "name".
bool IsRepositoryId(absl::string_view id) {
  const std::vector<absl::string_view> parts = absl::StrSplit(id, '/');
  return parts.size() <= 2 && std::all_of(parts.begin(), parts.end(), IsRepositoryPart);
}

// Revisions may have several parts ("refs/pr/1"), none of which may lead elsewhere.
bool IsRevision(absl::string_view revision) {
  const std::vector<absl::string_view> parts = absl::StrSplit(revision, '/');
  return std::all_of(parts.begin(), parts.end(), IsRepositoryPart);
}

// The snapshot's directory for a ref or commit, NOT_FOUND when the cache has none.
absl::StatusOr<std::string> FindSnapshot(const std::string& repository, const std::string& revision) {
  std::string commit = revision;
  const std::string ref = JoinPath(JoinPath(repository, "refs"), revision);
  if (IsRegularFile(ref)) {
    QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(ref, 4 * kKiB));
    commit = std::string(absl::StripAsciiWhitespace(text));
    if (!IsRepositoryPart(commit)) return absl::InvalidArgumentError(absl::StrCat(ref, ": does not hold the name of a commit"));
  }
  const std::string snapshots = JoinPath(repository, "snapshots");
  const std::string snapshot = JoinPath(snapshots, commit);
  if (IsRepositoryPart(commit) && IsDirectory(snapshot)) return AbsolutePath(snapshot);
  const absl::StatusOr<std::vector<std::string>> present = ListDirectory(snapshots);
  return absl::NotFoundError(absl::StrCat("no revision ", revision, " in ", repository, "; snapshots there: ",
                                          present.ok() && !present->empty() ? absl::StrJoin(*present, ", ") : "none"));
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& directory) {
  Checkpoint checkpoint;
  checkpoint.directory_ = AbsolutePath(directory);
  if (!IsValidUtf8(checkpoint.directory_)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the path \"", EscapeUnlessUtf8(checkpoint.directory_), "\" is no UTF-8; rename the directory"));
  }
  QUERN_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(checkpoint.directory_));
  QUERN_ASSIGN_OR_RETURN(const std::string config, ReadConfig(checkpoint.directory_));
  QUERN_ASSIGN_OR_RETURN(checkpoint.config_, ParseModelConfig(config, JoinPath(checkpoint.directory_, kConfigName)));
  QUERN_ASSIGN_OR_RETURN(Layout layout, FindLayout(checkpoint.directory_, names));
  for (const std::string& name : layout.shard_names) QUERN_RETURN_IF_ERROR(CheckName(checkpoint.directory_, name));

  std::vector<std::string> problems;
  for (const std::string& name : layout.shard_names) {
    Shard shard;
    shard.name = name;
    shard.path = JoinPath(checkpoint.directory_, name);
    if (!FileExists(shard.path)) {
      // Without an index its name was found in the directory.
      problems.push_back(layout.index_name.empty() ? absl::StrCat(name, " is a link to a file that is not there (an interrupted download?)")
                                                   : absl::StrCat("missing file ", name, ", which ", layout.index_name, " names"));
      continue;
    }
    absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(shard.path);
    if (!header.ok()) {
      problems.emplace_back(header.status().message());
      continue;
    }
    shard.header = *std::move(header);
    // The header covers the file to its end, so this is the size that was checked.
    shard.size = shard.header.data_start + (shard.header.tensors.empty() ? 0 : shard.header.tensors.back().end);
    checkpoint.shards_.push_back(std::move(shard));
  }
  for (uint32_t i = 0; i < checkpoint.shards_.size(); ++i) {
    for (const TensorInfo& tensor : checkpoint.shards_[i].header.tensors) {
      const auto [entry, inserted] = checkpoint.by_name_.emplace(tensor.name, checkpoint.tensors_.size());
      if (!inserted) {
        problems.push_back(absl::StrCat("tensor \"", tensor.name, "\" stands in both ",
                                        checkpoint.shards_[checkpoint.tensors_[entry->second].shard].name, " and ",
                                        checkpoint.shards_[i].name));
        continue;
      }
      checkpoint.tensors_.push_back({i, &tensor});
    }
  }
  for (const auto& entry : layout.index.weight_map) {
    const std::string& tensor = entry.first;
    const std::string& file = entry.second;
    const TensorLocation* location = checkpoint.Find(tensor);
    if (location != nullptr && checkpoint.shards_[location->shard].name == file) continue;
    const bool opened = std::any_of(checkpoint.shards_.begin(), checkpoint.shards_.end(), [&](const Shard& s) { return s.name == file; });
    // Of a shard that could not be opened the reason stands above.
    if (opened) problems.push_back(absl::StrCat("tensor \"", tensor, "\" is not in ", file, ", where ", layout.index_name, " says it is"));
  }
  QUERN_RETURN_IF_ERROR(ProblemsToStatus(checkpoint.directory_, problems));
  QUERN_RETURN_IF_ERROR(SortFiles(checkpoint.directory_, names, layout, &checkpoint.side_files_, &checkpoint.skipped_files_));
  for (const std::string& name : checkpoint.side_files_) QUERN_RETURN_IF_ERROR(CheckName(checkpoint.directory_, name));
  // What stays behind is only told of.
  for (auto& [name, why] : checkpoint.skipped_files_) name = EscapeUnlessUtf8(name);
  checkpoint.index_ = std::move(layout.index);
  return checkpoint;
}

const TensorLocation* Checkpoint::Find(absl::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

std::string HubCacheDirectory() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (std::string value = Environment(name); !value.empty()) return value;
  }
  if (const std::string home = Environment("HF_HOME"); !home.empty()) return JoinPath(home, "hub");
  if (const std::string cache = Environment("XDG_CACHE_HOME"); !cache.empty()) return JoinPath(cache, "huggingface/hub");
  return JoinPath(Environment("HOME"), ".cache/huggingface/hub");
}

bool IsHubName(absl::string_view source) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(source, absl::MaxSplits('@', 1));
  return IsRepositoryId(parts.first) && (!absl::StrContains(source, '@') || IsRevision(parts.second));
}

absl::StatusOr<std::string> ResolveSource(absl::string_view source) {
  if (source.empty()) return absl::InvalidArgumentError("the source is empty: give a directory or org/name[@revision]");
  const std::string path(source);
  if (IsDirectory(path)) return AbsolutePath(source);
  if (FileExists(path)) return absl::InvalidArgumentError(absl::StrCat(path, " is a file: give the checkpoint's directory"));
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(source, absl::MaxSplits('@', 1));
  const std::string revision(absl::StrContains(source, '@') ? parts.second : "main");
  if (!IsRepositoryId(parts.first) || !IsRevision(revision)) return absl::NotFoundError(absl::StrCat("there is no directory ", source));
  const std::string cache = HubCacheDirectory();
  const std::string repository = JoinPath(cache, absl::StrCat("models--", absl::StrReplaceAll(parts.first, {{"/", "--"}})));
  if (!IsDirectory(repository)) {
    return absl::NotFoundError(absl::StrCat("there is no directory ", source, ", and the Hugging Face cache has no ", repository,
                                            "; download it first: hf download ", parts.first));
  }
  return FindSnapshot(repository, revision);
}

}  // namespace quern::checkpoint
