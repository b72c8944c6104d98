#include "daemon/planner/module_inputs.h"

#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct Values {
  std::string name;
  std::vector<uint64_t> shape;
  std::vector<float> values;
  DType dtype = DType::kF32;
};

class ModuleInputsTest : public testing::Test {
 protected:
  std::string Write(const std::vector<Values>& tensors) {
    std::vector<checkpoint::TensorInfo> infos;
    std::string data;
    for (const Values& tensor : tensors) {
      const uint64_t begin = data.size();
      for (float value : tensor.values) {
        char bytes[4];
        std::memcpy(bytes, &value, 4);
        data.append(bytes, 4);
      }
      infos.push_back({tensor.name, tensor.dtype, tensor.shape, begin, data.size()});
    }
    const std::string path = JoinPath(directory_.path(), "inputs.safetensors");
    std::ofstream(path, std::ios::binary) << checkpoint::BuildSafetensorsHeader(infos) << data;
    return path;
  }

  static const quant::Scheme& SchemeOf(absl::string_view preset, quant::Observer observer = quant::Observer::kMinMax) {
    quant::SchemeSpec spec = *quant::PresetScheme(preset);
    spec.observer = observer;
    return **quant::Scheme::For(spec);
  }

  TempDir directory_ = *TempDir::Make("module_inputs_test");
  quern::v1::PlanSummary summary_;
  quern::v1::TaskSpec task_;
  quern::v1::QuantizeUnit unit_;
};

TEST_F(ModuleInputsTest, ActivationAmaxByEitherName) {
  const std::string path = Write({{"a.q_proj", {}, {3}}, {"a.k_proj.input_amax", {1}, {2.5}}, {"a.v_proj", {1}, {1}}});
  QUERN_ASSERT_OK_AND_ASSIGN(ModuleInputs inputs, ModuleInputs::Open(path, "", true, summary_));
  ASSERT_EQ(summary_.input_files_size(), 1);
  EXPECT_EQ(summary_.input_files(0).path(), path);
  EXPECT_EQ(summary_.input_files(0).content_sha256().size(), 32u);
  QUERN_ASSERT_OK(inputs.AddTo({"a.q_proj", "", 16}, SchemeOf("NVFP4"), task_, unit_));
  EXPECT_EQ(unit_.activation_amax(), 3);
  QUERN_ASSERT_OK(inputs.AddTo({"b.k_proj", "a.k_proj", 16}, SchemeOf("NVFP4"), task_, unit_));
  EXPECT_EQ(unit_.activation_amax(), 2.5);
  EXPECT_EQ(task_.source_files_size(), 0) << "the value is in the plan";
  EXPECT_THAT(inputs.Warnings(), ElementsAre(AllOf(HasSubstr("1 entries"), HasSubstr("a.v_proj"))));
  quern::v1::QuantizeUnit untouched;
  QUERN_ASSERT_OK(inputs.AddTo({"c", "", 16}, SchemeOf("NVFP4A16"), task_, untouched));
  EXPECT_FALSE(untouched.has_activation_amax());
}

TEST_F(ModuleInputsTest, WrongAmaxIsRefused) {
  const std::string path = Write({{"zero", {}, {0}},
                                  {"negative", {}, {-1}},
                                  {"nan", {}, {std::numeric_limits<float>::quiet_NaN()}},
                                  {"infinite", {}, {std::numeric_limits<float>::infinity()}},
                                  {"two", {2}, {1, 1}},
                                  {"integer", {}, {1}, DType::kI32}});
  QUERN_ASSERT_OK_AND_ASSIGN(ModuleInputs inputs, ModuleInputs::Open(path, "", false, summary_));
  for (const char* name : {"zero", "negative", "nan", "infinite", "two", "integer"}) {
    EXPECT_THAT(inputs.AddTo({name, "", 16}, SchemeOf("NVFP4"), task_, unit_), StatusIs(kInvalid, HasSubstr(name))) << name;
  }
  EXPECT_THAT(inputs.AddTo({"missing", "", 16}, SchemeOf("NVFP4"), task_, unit_),
              StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr(path), HasSubstr("--activation-scales"))));
}

TEST_F(ModuleInputsTest, AmaxThatOverflowsTheWeightsDTypeIsRefused) {
  const std::string path = Write({{"a", {}, {65520}}, {"b", {}, {65519}}});
  QUERN_ASSERT_OK_AND_ASSIGN(ModuleInputs inputs, ModuleInputs::Open(path, "", false, summary_));
  EXPECT_THAT(inputs.AddTo({"a", "", 16, DType::kF16}, SchemeOf("NVFP4"), task_, unit_), StatusIs(kInvalid, HasSubstr("overflows F16")));
  QUERN_EXPECT_OK(inputs.AddTo({"b", "", 16, DType::kF16}, SchemeOf("NVFP4"), task_, unit_));
  QUERN_EXPECT_OK(inputs.AddTo({"a", "", 16, DType::kBF16}, SchemeOf("NVFP4"), task_, unit_));
}

TEST_F(ModuleInputsTest, AmaxThatNoScaleCanBeMadeOfIsRefusedByTheNameOfItsFile) {
  const std::string path = Write({{"huge", {}, {3.4e38f}}, {"tiny", {}, {1e-44f}}});
  QUERN_ASSERT_OK_AND_ASSIGN(ModuleInputs inputs, ModuleInputs::Open(path, "", false, summary_));
  for (const char* name : {"huge", "tiny"}) {
    EXPECT_THAT(inputs.AddTo({name, "", 16}, SchemeOf("NVFP4"), task_, unit_),
                StatusIs(kInvalid, StartsWith(absl::StrCat(path, ": ", name))));
  }
}

TEST_F(ModuleInputsTest, ScalesThatLoseDigitsAreTold) {
  const std::string path = Write({{"a", {}, {0x1.bfp-6f}}, {"b", {}, {448 * 0x1p-14f}}, {"c", {}, {1e-36f}}});
  QUERN_ASSERT_OK_AND_ASSIGN(ModuleInputs inputs, ModuleInputs::Open(path, "", false, summary_));
  const quant::Scheme& fp8 = SchemeOf("FP8");
  QUERN_ASSERT_OK(inputs.AddTo({"b", "", 16, DType::kF16}, fp8, task_, unit_));
  QUERN_ASSERT_OK(inputs.AddTo({"a", "", 16, DType::kBF16}, fp8, task_, unit_));
  QUERN_ASSERT_OK(inputs.AddTo({"a", "", 16, DType::kF16}, **quant::Scheme::For(*quant::ToModelOpt(fp8.spec())), task_, unit_));
  EXPECT_THAT(inputs.Warnings(), ElementsAre(HasSubstr("1 entries")));
  QUERN_ASSERT_OK(inputs.AddTo({"a", "", 16, DType::kF16}, fp8, task_, unit_));
  QUERN_ASSERT_OK(inputs.AddTo({"c", "", 16, DType::kBF16}, fp8, task_, unit_));
  EXPECT_THAT(inputs.Warnings(), ElementsAre(AllOf(HasSubstr("2 modules are subnormal"), HasSubstr("a, c"))));
}

TEST_F(ModuleInputsTest, WrongImportanceIsRefused) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  const std::string path =
      Write({{"good", {2}, {0, 3}}, {"negative", {2}, {1, -0.5}}, {"nan", {2}, {kNan, 1}}, {"infinite", {2}, {1, kInf}}});
  QUERN_ASSERT_OK_AND_ASSIGN(ModuleInputs inputs, ModuleInputs::Open("", path, false, summary_));
  const quant::Scheme& scheme = SchemeOf("W4A16", quant::Observer::kImportance);
  QUERN_EXPECT_OK(inputs.AddTo({"good", "", 2}, scheme, task_, unit_));
  EXPECT_EQ(unit_.inputs_size(), 1);
  EXPECT_THAT(inputs.AddTo({"negative", "", 2}, scheme, task_, unit_), StatusIs(kInvalid, HasSubstr("column 1 is -0.5")));
  EXPECT_THAT(inputs.AddTo({"nan", "", 2}, scheme, task_, unit_), StatusIs(kInvalid, HasSubstr("column 0 is nan")));
  EXPECT_THAT(inputs.AddTo({"infinite", "", 2}, scheme, task_, unit_), StatusIs(kInvalid, HasSubstr("column 1 is inf")));
  EXPECT_EQ(unit_.inputs_size(), 1);
}

TEST_F(ModuleInputsTest, FilesThatCannotBeUsed) {
  EXPECT_THAT(ModuleInputs::Open("/nowhere/x", "", false, summary_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("--activation-scales")));
  const std::string path = Write({{"a", {}, {1}}, {"a.input_amax", {}, {1}}});
  EXPECT_THAT(ModuleInputs::Open(path, "", false, summary_), StatusIs(kInvalid, HasSubstr("with and without")));
  QUERN_ASSERT_OK_AND_ASSIGN(ModuleInputs none, ModuleInputs::Open("", "", false, summary_));
  EXPECT_THAT(none.AddTo({"a", "", 16}, SchemeOf("NVFP4"), task_, unit_), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(none.Warnings(), IsEmpty());
}

}  // namespace
}  // namespace quern::daemon
