// The same bytes, decoded values and error figures from the scalar definition over a whole weight and from every SIMD target of this
// machine, any division into tiles and any number of threads: schemes, dtypes, shapes and divisions are drawn at random from a seed. What
// other machines gave stands in tests/golden/scheme_digests.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "hwy/targets.h"
#include "quant/kernels/scalar_definition.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

// A supported scheme near one of the presets.
class SpecDraw {
 public:
  explicit SpecDraw(std::mt19937_64& random) : random_(random) {
    for (const std::string& name : PresetNames()) {
      const SchemeSpec spec = *PresetScheme(name);
      bases_.push_back(spec);
      if (const absl::StatusOr<SchemeSpec> other = ToModelOpt(spec); other.ok()) bases_.push_back(*other);
    }
    for (const DType dtype : kDTypes) bases_.push_back(*PlainSpec(dtype));
  }

  SchemeSpec Draw() {
    while (true) {
      SchemeSpec spec = bases_[random_() % bases_.size()];
      const bool integer = spec.type == NumberType::kInt;
      if (integer && random_() % 2 == 0) spec.symmetric = !spec.symmetric;
      if (random_() % 4 == 0) spec.numerics = Numerics::kPrecise;
      if (random_() % 2 == 0) spec.observer = static_cast<Observer>(random_() % 4);
      if (integer && random_() % 2 == 0) {
        spec.strategy = static_cast<Strategy>(random_() % 3);
        constexpr int64_t kGroups[] = {16, 24, 32, 64, 96, 128};
        spec.group_size = spec.strategy == Strategy::kGroup ? kGroups[random_() % 6] : 0;
      }
      if (CheckSupported(spec).ok()) return spec;
    }
  }

  const std::vector<SchemeSpec>& bases() const { return bases_; }

 private:
  std::mt19937_64& random_;
  std::vector<SchemeSpec> bases_;
};

// A shape that the scheme takes.
Shape2D DrawShape(const Scheme& scheme, std::mt19937_64& random) {
  const int64_t rows = random() % 4 == 0 ? 1 + random() % 4 : 1 + random() % 200;
  const int64_t any = 1 + random() % 700;
  if (scheme.CheckWeight(DType::kBF16, {rows, any}).ok()) return {rows, any};
  const int64_t multiple = std::max<int64_t>(scheme.spec().group_size, 1);
  return {rows, multiple * static_cast<int64_t>(1 + random() % (1 + 700 / multiple))};
}

// Puts NaN and Inf of both signs at a few places.
void Spoil(TestWeight& weight, std::mt19937_64& random) {
  const int64_t size = BytesPerElement(weight.dtype);
  for (int i = 0; i < 5; ++i) {
    char* const at = weight.bytes.data() + random() % (weight.shape.rows * weight.shape.cols) * size;
    const uint16_t infinity = weight.dtype == DType::kF16 ? 0x7C00 : 0x7F80;
    const uint16_t top = infinity | (random() % 2 != 0 ? 0x8000 : 0) | (random() % 2 != 0 ? 0x0040 : 0);
    std::memset(at, 0, size);
    std::memcpy(at + size - 2, &top, 2);
  }
}

struct Inputs {
  std::vector<float> importance;
  ModuleInputs module;
};

void DrawInputs(int64_t columns, std::mt19937_64& random, Inputs* inputs) {
  for (int64_t i = 0; i < columns; ++i) {
    if (random() % 16 == 0) {
      inputs->importance.push_back(0);
      continue;
    }
    // One after the other: compilers draw arguments in different orders.
    const int exponent = static_cast<int>(random() % 20) - 10;
    inputs->importance.push_back(std::ldexp(static_cast<float>(random() % 1000), exponent));
  }
  inputs->module.importance = inputs->importance;
  inputs->module.activation_amax = 3.25f;
}

class ScalarDefinition {
 public:
  ScalarDefinition() { scalar_definition_for_test = true; }
  ~ScalarDefinition() { scalar_definition_for_test = false; }
};

TEST(SameBytesTest, ScalarDefinitionTargetsTilesAndThreadsAgree) {
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  std::map<std::string, int> drawn;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    SpecDraw draw(random);
    QUERN_ASSERT_OK_AND_ASSIGN(const Scheme* scheme, Scheme::For(draw.Draw()));
    const DType dtype = kDTypes[random() % 3];
    const Shape2D shape = DrawShape(*scheme, random);
    QUERN_ASSERT_OK(scheme->CheckWeight(dtype, shape));
    ++drawn[std::string(FormatName(scheme->spec()))];
    TestWeight weight = RandomWeight(dtype, shape, seed);
    const NonfinitePolicy policy = random() % 2 == 0 ? NonfinitePolicy::kClamp : NonfinitePolicy::kFail;
    if (policy == NonfinitePolicy::kClamp) Spoil(weight, random);
    Inputs inputs;
    DrawInputs(shape.cols, random, &inputs);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", scheme->spec().ToString(), ", ", std::string(DTypeName(dtype)), " [", shape.rows, ", ",
                              shape.cols, "]", policy == NonfinitePolicy::kClamp ? ", nonfinite: clamp" : ""));
    const Tiling whole = {(shape.rows + 127) / 128 * 128, 0};
    absl::StatusOr<EncodedWeight> expected;
    std::string decoded;
    {
      ScalarDefinition definition;
      expected = EncodeWeight(*scheme, weight, whole, policy, inputs.module);
      if (expected.ok()) {
        QUERN_ASSERT_OK_AND_ASSIGN(decoded, DecodeWeight(*scheme, weight, *expected, whole));
      }
    }
    for (int trial = 0; trial < 4; ++trial) {
      hwy::SetSupportedTargetsForTest(targets[random() % targets.size()]);
      const int64_t row_multiple = scheme->RowMultiple();
      Tiling tiling = {row_multiple * static_cast<int64_t>(1 + random() % 4), 0, static_cast<int>(random() % 4), random()};
      const Strategy strategy = scheme->spec().strategy;
      const bool whole_rows =
          (strategy == Strategy::kChannel || strategy == Strategy::kBlock) && scheme->spec().observer != Observer::kMinMax;
      if (trial == 3 && !whole_rows) tiling.segment_columns = scheme->ColumnMultiple() * static_cast<int64_t>(1 + random() % 3);
      SCOPED_TRACE(absl::StrCat(KernelTarget(), ", bands of ", tiling.band_rows, ", segments of ", tiling.segment_columns, ", ",
                                tiling.threads, " threads"));
      absl::StatusOr<EncodedWeight> actual = EncodeWeight(*scheme, weight, tiling, policy, inputs.module);
      ASSERT_EQ(actual.status().code(), expected.status().code()) << actual.status() << " and " << expected.status();
      if (!expected.ok()) continue;
      for (size_t i = 0; i < expected->data.size(); ++i) {
        EXPECT_TRUE(actual->data[i] == expected->data[i]) << expected->regions[i].suffix;
      }
      EXPECT_TRUE(SameErrors(actual->errors, expected->errors));
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string back, DecodeWeight(*scheme, weight, *actual, tiling));
      EXPECT_TRUE(back == decoded) << "decoded values";
    }
    hwy::SetSupportedTargetsForTest(0);
    if (HasFailure()) break;
  }
  for (const auto& [format, count] : drawn) std::cout << format << ": " << count << " weights\n";
}

// Bytes, computed regions and figures of seeded weights, by every scheme of the file. A change is a change of the numerics version.
TEST(SameBytesTest, DigestsAreThoseOfEveryOtherMachine) {
  std::map<std::string, std::string> expected;  // by "<scheme> of <dtype>"
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string file, ReadFileToString("tests/golden/scheme_digests.txt"));
  for (const absl::string_view line : absl::StrSplit(file, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    expected[parts.at(1)] = parts.at(0);
  }
  // All presets, in both conventions, are in it.
  std::mt19937_64 random(1);
  const SpecDraw draw(random);
  for (const SchemeSpec& base : draw.bases()) {
    if (!CheckSupported(base).ok()) continue;
    for (const DType dtype : kDTypes) {
      const std::string name = absl::StrCat(base.ToString(), " of ", std::string(DTypeName(dtype)));
      if (expected.try_emplace(name, "no digest").second) ADD_FAILURE() << "no digest of " << name;
    }
  }
  std::map<std::string, std::string> actual;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    for (const auto& [name, digest] : expected) {
      const std::pair<std::string, std::string> parts = absl::StrSplit(name, " of ");
      QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec spec, SchemeSpec::Parse(parts.first));
      QUERN_ASSERT_OK_AND_ASSIGN(const Scheme* scheme, Scheme::For(spec));
      QUERN_ASSERT_OK_AND_ASSIGN(const DType dtype, ParseDType(parts.second));
      const TestWeight weight = RandomWeight(dtype, {37, 384}, 77);
      Inputs inputs;
      std::mt19937_64 same(7);
      DrawInputs(weight.shape.cols, same, &inputs);
      QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight encoded,
                                 EncodeWeight(*scheme, weight, {128, 0}, NonfinitePolicy::kFail, inputs.module));
      actual[name] = DigestOf(encoded).substr(0, 32);
      EXPECT_EQ(actual[name], digest) << name << " on " << KernelTarget();
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  if (actual == expected) return;
  const std::string path = testing::TempDir() + "scheme_digests.txt";
  std::ofstream out(path);
  for (const auto& [name, digest] : actual) out << digest << " " << name << "\n";
  ADD_FAILURE() << "the digests of this machine are in " << path;
}

}  // namespace
}  // namespace quern::quant
