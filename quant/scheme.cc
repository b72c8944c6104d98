#include "quant/scheme.h"

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status_macros.h"
#include "quant/float_scheme.h"
#include "quant/integer_scheme.h"
#include "quant/plain_scheme.h"
#include "quant/tile_support.h"

namespace quern::quant {
namespace {

// Schemes made so far, by their canonical text. Never freed: they live as long as the program.
struct Registry {
  Mutex mutex;
  std::map<std::string, std::unique_ptr<const Scheme>> schemes QUERN_GUARDED_BY(mutex);
};

Registry& TheRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

class InlineBackend : public EncodeBackend {
 public:
  void Submit(const Request& request, std::function<void(absl::Status)> done) override {
    done(request.scheme->Encode(request.tile, request.inputs, request.statistics, request.nonfinite, request.regions, request.errors));
  }
};

std::unique_ptr<const Scheme> Make(const SchemeSpec& spec) {
  switch (spec.type) {
    case NumberType::kPlain:
      return std::make_unique<PlainScheme>(spec);
    case NumberType::kFloat:
      return std::make_unique<FloatScheme>(spec);
    case NumberType::kInt:
      break;
  }
  return std::make_unique<IntegerScheme>(spec);
}

}  // namespace

absl::StatusOr<const Scheme*> Scheme::For(const SchemeSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckSupported(spec));
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  std::unique_ptr<const Scheme>& scheme = registry.schemes[spec.ToString()];
  if (scheme == nullptr) scheme = Make(spec);
  return scheme.get();
}

absl::Status Scheme::CheckActivationAmax(DType, float) const { return absl::OkStatus(); }

absl::StatusOr<std::vector<std::string>> Scheme::ComputedRegions(DType, Shape2D, const Statistics*, const ModuleInputs&) const {
  return std::vector<std::string>();
}

int64_t Scheme::RowsSearchedWhole() const {
  if (spec().observer == Observer::kMinMax) return 0;
  return spec().strategy == Strategy::kBlock ? RowMultiple() : spec().strategy == Strategy::kChannel ? 1 : 0;
}

void Scheme::AddErrors(const Tile& source, const std::byte* decoded, int64_t decoded_row_stride, absl::Span<RowError> errors) {
  const absl::StatusOr<IntegerTile> work = ElementsOf(source);
  if (!work.ok()) std::abort();  // Callers have the dtype from a weight that CheckWeight admitted.
  quant::AddErrors(*work, reinterpret_cast<const unsigned char*>(decoded), decoded_row_stride, errors.data());
}

std::string KernelTarget() { return ActiveTarget(); }

EncodeBackend* EncodeBackend::Cpu() {
  static InlineBackend* const backend = new InlineBackend;
  return backend;
}

}  // namespace quern::quant
