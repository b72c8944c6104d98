#include <fcntl.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/family.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/selection.h"

namespace quern::daemon {
namespace {

using checkpoint::TensorInfo;
using quern::v1::InspectCheckpointResponse;

struct Sum {
  uint64_t tensors = 0;
  uint64_t bytes = 0;
  uint64_t parameters = 0;
};

InspectCheckpointResponse::Group ToGroup(std::string key, const Sum& sum) {
  InspectCheckpointResponse::Group group;
  group.set_key(std::move(key));
  group.set_tensors(sum.tensors);
  group.set_bytes(sum.bytes);
  group.set_parameters(sum.parameters);
  return group;
}

// Weights that a packed tensor stands for: what its weight_shape says, as far as that is possible.
absl::StatusOr<uint64_t> PackedParameters(const checkpoint::Checkpoint& source, const TensorInfo& packed, std::vector<UniqueFd>& files) {
  const uint64_t most = packed.bytes() * 8;
  const std::string name = absl::StrCat(absl::StripSuffix(packed.name, "weight_packed"), "weight_shape");
  const checkpoint::TensorLocation* shape = source.Find(name);
  if (shape == nullptr || shape->info->dtype != DType::kI64 || shape->info->bytes() != 16) return packed.elements();
  const checkpoint::Shard& shard = source.shards()[shape->shard];
  UniqueFd& file = files[shape->shard];
  if (!file) {
    QUERN_ASSIGN_OR_RETURN(file, OpenFile(shard.path, O_RDONLY));
  }
  unsigned char bytes[16];
  QUERN_RETURN_IF_ERROR(ReadExactly(file.get(), shard.header.data_start + shape->info->begin, bytes, sizeof(bytes), shard.path));
  uint64_t sides[2] = {0, 0};
  for (int i = 0; i < 16; ++i) sides[i / 8] |= uint64_t{bytes[i]} << (8 * (i % 8));
  if (sides[0] == 0 || sides[1] == 0 || sides[0] > most || sides[1] > most / sides[0]) {
    return absl::InvalidArgumentError(
        absl::StrCat(shard.path, ": ", name, " says [", sides[0], ", ", sides[1], "], which ", packed.name, " cannot hold"));
  }
  return sides[0] * sides[1];
}

std::string QuantizationName(const std::string& quantization_config) {
  if (quantization_config.empty()) return "";
  const nlohmann::json config = nlohmann::json::parse(quantization_config, nullptr, /*allow_exceptions=*/false);
  const auto text = [&](const char* key) {
    return config.is_object() && config.contains(key) && config[key].is_string() ? config[key].get<std::string>() : std::string();
  };
  const std::string method = text("quant_method"), format = text("format");
  if (method.empty() && format.empty()) return "unknown";
  return method.empty() || format.empty() ? absl::StrCat(method, format) : absl::StrCat(method, " ", format);
}

}  // namespace

absl::StatusOr<InspectCheckpointResponse> Inspect(const std::string& directory) {
  QUERN_ASSIGN_OR_RETURN(const std::string resolved, checkpoint::ResolveSource(directory));
  QUERN_ASSIGN_OR_RETURN(const checkpoint::Checkpoint source, checkpoint::Checkpoint::Open(resolved));
  const checkpoint::Family& family = checkpoint::Family::For(source.config());
  InspectCheckpointResponse response;
  response.set_path(source.directory());
  response.set_model_type(source.config().model_type);
  response.set_files(source.shards().size());
  response.set_tensors(source.tensors().size());
  response.set_quantization(QuantizationName(source.config().quantization_config));
  for (const checkpoint::Shard& shard : source.shards()) response.set_bytes(response.bytes() + shard.size);

  std::map<std::optional<uint32_t>, Sum> layers;  // outside of the layers first
  std::map<checkpoint::Role, Sum> roles;
  std::map<std::string, Sum> dtypes;
  std::vector<UniqueFd> files(source.shards().size());
  for (const checkpoint::TensorLocation& location : source.tensors()) {
    const TensorInfo& info = *location.info;
    const checkpoint::ModuleIdentity identity = family.Identify(info.name, source.config());
    uint64_t parameters = info.elements();
    // A vector named "scale" is one that the model learned.
    const bool learned = identity.parameter == "scale" && info.shape.size() == 1;
    if (checkpoint::IsStorageParameter(identity.parameter) && !learned) parameters = 0;
    if (identity.parameter == "weight_packed") {
      QUERN_ASSIGN_OR_RETURN(parameters, PackedParameters(source, info, files));
    }
    response.set_parameters(response.parameters() + parameters);
    for (Sum* sum : {&layers[identity.layer], &roles[identity.role], &dtypes[std::string(DTypeName(info.dtype))]}) {
      sum->tensors += 1;
      sum->bytes += info.bytes();
      sum->parameters += parameters;
    }
  }
  for (const auto& [layer, sum] : layers) *response.add_layers() = ToGroup(layer.has_value() ? absl::StrCat(*layer) : "", sum);
  for (const auto& [role, sum] : roles) *response.add_roles() = ToGroup(std::string(checkpoint::RoleName(role)), sum);
  for (const auto& [dtype, sum] : dtypes) *response.add_dtypes() = ToGroup(dtype, sum);
  if (!family.known()) response.add_warnings(UnknownTypeWarning(source.config()));
  for (const auto& [name, why] : source.skipped_files()) response.add_warnings(absl::StrCat(name, ": ", why));
  return response;
}

}  // namespace quern::daemon
