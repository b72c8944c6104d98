#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/model_config.h"
#include "daemon/manifest/manifest.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/test_checkpoint.h"

namespace quern::daemon {
namespace {

using quern::v1::JobSpec;
using quern::v1::ValueCheck;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// An output as publishing would leave it, but with zeros for data.
class VerifyPlan : public testing::Test {
 protected:
  VerifyPlan() : source_("llama"), output_(*TempDir::Make("planner_verify")) {
    source_.AddDenseLayer(0, 64, 96);
    source_.AddDenseLayer(1, 64, 96);
    source_.AddOuter(40, 64);
    source_.Write();
  }

  void SetUp() override {
    JobSpec job = QuantizeJob(source_.path(), "{scheme: W3A16_ASYM, group_size: 32}");
    job.mutable_quantize()->set_max_shard_size(40'000);
    QUERN_ASSERT_OK_AND_ASSIGN(plan_, MakePlan(job, true));
    ASSERT_GT(plan_.tasks.size(), 1u);
    manifest_.numerics_version = plan_.summary.numerics_version();
    manifest_.recipe = plan_.summary.resolved_recipe();
    manifest_.export_format = "compressed-tensors";
    manifest_.max_shard_size = 40'000;
    for (const quern::v1::SourceFile& file : plan_.summary.source_files()) {
      manifest_.source_files.push_back({BaseName(file.path()), file.size(), file.header_sha256()});
    }
    checkpoint::ShardIndex index;
    for (const quern::v1::TaskSpec& task : plan_.tasks) {
      WriteSparseShard(Path(task.label()), task.write_shard().header(), task.write_shard().file_size());
      AddFile(task.label());
      for (const quern::v1::ShardUnit& unit : task.write_shard().units()) {
        if (unit.has_copy()) {
          index.weight_map[unit.copy().output().name()] = task.label();
          manifest_.copied.push_back({unit.copy().output().name(), "model.safetensors", std::string(16, 'd'), task.label(),
                                      unit.copy().role(), unit.copy().reason()});
          continue;
        }
        const quern::v1::QuantizeUnit& quantize = unit.quantize();
        for (const quern::v1::OutputTensor& output : quantize.outputs()) index.weight_map[output.name()] = task.label();
        ManifestModule module;
        module.module = quantize.module();
        module.scheme = quantize.scheme();
        module.source_tensor = quantize.weight().tensor();
        module.source_file = "model.safetensors";
        module.source_dtype = quantize.weight().dtype();
        module.source_shape = {quantize.weight().rows(), quantize.weight().cols()};
        module.source_digest = std::string(16, 'd');
        module.shard = task.label();
        module.role = quantize.role();
        module.reason = quantize.reason();
        module.error.set_module(module.module);
        module.error.set_count(quantize.weight().rows() * quantize.weight().cols());
        manifest_.modules.push_back(std::move(module));
      }
    }
    WriteText(Path("model.safetensors.index.json"), checkpoint::BuildShardIndex(index));
    AddFile("model.safetensors.index.json");
    QUERN_ASSERT_OK_AND_ASSIGN(const checkpoint::Checkpoint source, checkpoint::Checkpoint::Open(source_.path()));
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string config,
                               checkpoint::WithQuantizationConfig(source.config(), plan_.summary.quantization_config()));
    WriteText(Path("config.json"), config);
    AddFile("config.json");
    QUERN_ASSERT_OK(MakeDirectories(Path(".quern")));
    WriteText(Path(".quern/run.json"), "{}");
    WriteManifest();
  }

  std::string Path(const std::string& name) const { return JoinPath(output_.path(), name); }

  void AddFile(const std::string& name) {
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(Path(name)));
    manifest_.files.push_back({name, content.size(), Sha256Of(content)});
  }

  void WriteManifest() { WriteText(Path(kManifestName), ManifestToJson(manifest_)); }

  void Edit(const std::string& name, absl::string_view from, absl::string_view to) {
    QUERN_ASSERT_OK_AND_ASSIGN(std::string text, ReadFileToString(Path(name)));
    const size_t at = text.find(std::string(from));
    ASSERT_NE(at, std::string::npos) << name << " lacks " << from;
    text.replace(at, from.size(), std::string(to));
    WriteText(Path(name), text);
  }

  absl::StatusOr<Plan> Verify(bool against = false) const {
    JobSpec job;
    job.set_operation(quern::v1::VERIFY);
    job.set_output(output_.path());
    job.mutable_verify();
    if (against) job.mutable_verify()->set_against(source_.path());
    return MakePlan(job, true);
  }

  // "file tensor: what" of each mismatch.
  std::vector<std::string> Mismatches(bool against = false) const {
    const absl::StatusOr<Plan> plan = Verify(against);
    EXPECT_THAT(plan, IsOk());
    std::vector<std::string> texts;
    if (!plan.ok()) return texts;
    for (const quern::v1::Mismatch& mismatch : plan->summary.mismatches()) {
      texts.push_back(absl::StrCat(mismatch.file(), " ", mismatch.tensor(), ": ", mismatch.what()));
    }
    return texts;
  }

  TestCheckpoint source_;
  TempDir output_;
  Plan plan_;
  Manifest manifest_;
};

TEST_F(VerifyPlan, IntactOutputHasATaskForEachFile) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, Verify());
  EXPECT_THAT(plan.summary.mismatches(), IsEmpty());
  ASSERT_EQ(plan.tasks.size(), manifest_.files.size());
  std::map<ValueCheck::Kind, int> kinds;
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    const quern::v1::VerifyFile& work = plan.tasks[i].verify_file();
    EXPECT_EQ(work.path(), Path(manifest_.files[i].name));
    EXPECT_EQ(work.size(), manifest_.files[i].size);
    EXPECT_EQ(work.sha256(), manifest_.files[i].sha256);
    EXPECT_EQ(plan.tasks[i].bytes_to_read(), work.size());
    for (const ValueCheck& check : work.checks()) {
      ++kinds[check.kind()];
      EXPECT_LE(check.tensor().offset() + check.tensor().size(), work.size());
      if (check.kind() == ValueCheck::EQUALS) {
        EXPECT_EQ(check.expected().size(), 16u);
      }
      if (check.kind() == ValueCheck::ZERO_TAIL_BITS) {
        EXPECT_EQ(check.num_bits(), 3u);
      }
      if (check.tensor().name() == "model.layers.0.mlp.up_proj.weight_packed") {
        EXPECT_EQ(check.elements(), 64u);
        EXPECT_EQ(check.packed_dim(), 1u);
      }
      if (check.tensor().name() == "model.layers.0.mlp.up_proj.weight_zero_point") {
        EXPECT_EQ(check.elements(), 96u);
        EXPECT_EQ(check.packed_dim(), 0u);
      }
    }
  }
  EXPECT_EQ(kinds[ValueCheck::EQUALS], 14);
  EXPECT_EQ(kinds[ValueCheck::FINITE_NONZERO], 14);
  EXPECT_EQ(kinds[ValueCheck::ZERO_TAIL_BITS], 28);
}

TEST_F(VerifyPlan, AgainstTheSourceEveryTensorIsCompared) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, Verify(true));
  EXPECT_THAT(plan.summary.mismatches(), IsEmpty());
  int quantized = 0, copied = 0;
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    for (const quern::v1::CompareUnit& unit : task.compare_shard().units()) {
      if (unit.has_copy()) {
        ++copied;
        EXPECT_EQ(unit.copy().source().cols(), unit.copy().output().size());
        continue;
      }
      ++quantized;
      EXPECT_EQ(unit.expected().module(), unit.quantize().module());
      EXPECT_EQ(unit.quantize().outputs_size(), 4);
      EXPECT_EQ(task.source_files(static_cast<int>(unit.quantize().weight().file())).path(), JoinPath(source_.path(), "model.safetensors"));
    }
  }
  EXPECT_EQ(quantized, 14);
  EXPECT_EQ(copied, 7);
}

TEST_F(VerifyPlan, SourceDigestsAreThoseOfTheManifest) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, Verify(true));
  int compared = 0;
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    quern::v1::TaskResult result;
    for (const quern::v1::CompareUnit& unit : task.compare_shard().units()) {
      quern::v1::ViewDigest& digest = *result.add_source_digests();
      digest.set_tensor(unit.has_quantize() ? unit.quantize().weight().tensor() : unit.copy().source().tensor());
      digest.set_digest(std::string(16, 'd'));
    }
    EXPECT_THAT(SourceDigestMismatches(manifest_, task, result), IsEmpty());
    if (result.source_digests_size() == 0) continue;
    ++compared;
    const int last = result.source_digests_size() - 1;
    result.mutable_source_digests(last)->set_digest(std::string(16, 'e'));
    const auto mismatches = SourceDigestMismatches(manifest_, task, result);
    ASSERT_THAT(mismatches, SizeIs(1));
    EXPECT_EQ(mismatches[0].file(), kManifestName);
    EXPECT_THAT(mismatches[0].what(), HasSubstr("the source's is 6565"));
  }
  EXPECT_GT(compared, 0);
}

// An output with plain weights, some of them in a stack, as publishing would leave it.
TEST(VerifyStacks, PlacesInAStackAreCheckedAndCompared) {
  TestCheckpoint source("llama4_text");
  const std::string experts = "model.layers.0.feed_forward.experts";
  for (int e = 0; e < 3; ++e) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      const bool down = name[0] == 'd';
      const std::string module = absl::StrCat(experts, ".", e, ".", name);
      source.Add({module + ".weight", {down ? 64u : 48u, down ? 48u : 64u}, DType::kF8E4M3});
      source.Add({module + ".weight_scale", {down ? 64u : 48u, 1}, DType::kF32});
    }
  }
  source.Write();
  JobSpec job;
  job.set_operation(quern::v1::DEQUANTIZE);
  job.mutable_dequantize()->set_source(source.path());
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan made, MakePlan(job, true));
  ASSERT_EQ(made.tasks.size(), 1u);
  const TempDir output = *TempDir::Make("planner_verify");
  const auto path = [&](const std::string& name) { return JoinPath(output.path(), name); };
  Manifest manifest;
  manifest.numerics_version = made.summary.numerics_version();
  manifest.recipe = made.summary.resolved_recipe();
  manifest.export_format = "plain";
  const quern::v1::SourceFile& file = made.summary.source_files(0);
  manifest.source_files.push_back({"model.safetensors", file.size(), file.header_sha256()});
  const quern::v1::TaskSpec& task = made.tasks[0];
  WriteSparseShard(path(task.label()), task.write_shard().header(), task.write_shard().file_size());
  WriteText(path("config.json"), "{\"model_type\": \"llama4_text\"}");
  for (const std::string& name : {task.label(), std::string("config.json")}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(path(name)));
    manifest.files.push_back({name, content.size(), Sha256Of(content)});
  }
  for (const quern::v1::ShardUnit& unit : task.write_shard().units()) {
    const quern::v1::QuantizeUnit& quantize = unit.quantize();
    ASSERT_TRUE(quantize.has_place());
    ManifestModule module;
    module.module = quantize.module();
    module.scheme = quantize.scheme();
    module.source_tensor = quantize.weight().tensor();
    module.source_file = "model.safetensors";
    module.source_dtype = quantize.weight().dtype();
    module.source_shape = {quantize.weight().rows(), quantize.weight().cols()};
    module.source_digest = std::string(16, 'd');
    module.shard = task.label();
    module.stack = {quantize.outputs(0).name(), quantize.place().offset(), static_cast<uint64_t>(quantize.place().row_stride()),
                    static_cast<uint64_t>(quantize.place().col_stride())};
    manifest.modules.push_back(std::move(module));
  }
  const auto verify = [&](const Manifest& text) {
    WriteText(path(kManifestName), ManifestToJson(text));
    JobSpec verify_job;
    verify_job.set_operation(quern::v1::VERIFY);
    verify_job.set_output(output.path());
    verify_job.mutable_verify()->set_against(source.path());
    return MakePlan(verify_job, false);
  };
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, verify(manifest));
  EXPECT_THAT(plan.summary.mismatches(), IsEmpty());
  std::vector<std::string> finite;
  int compared = 0;
  for (const quern::v1::TaskSpec& found : plan.tasks) {
    for (const ValueCheck& check : found.verify_file().checks()) {
      EXPECT_EQ(check.kind(), ValueCheck::FINITE);
      finite.push_back(check.tensor().name());
    }
    for (const quern::v1::CompareUnit& unit : found.compare_shard().units()) {
      const quern::v1::QuantizeUnit& written = task.write_shard().units(compared++).quantize();
      EXPECT_EQ(unit.quantize().module(), written.module());
      EXPECT_EQ(unit.quantize().place().SerializeAsString(), written.place().SerializeAsString());
      EXPECT_EQ(unit.quantize().outputs(0).SerializeAsString(), written.outputs(0).SerializeAsString());
    }
  }
  EXPECT_THAT(finite, ElementsAre(experts + ".down_proj", experts + ".gate_up_proj"));
  EXPECT_EQ(compared, 9);

  // Digests are those of modules, whose tensors may be one and the same.
  quern::v1::TaskSpec compare;
  quern::v1::TaskResult result;
  for (int i = 0; i < 2; ++i) {
    *compare.mutable_compare_shard()->add_units()->mutable_quantize() = task.write_shard().units(i).quantize();
    compare.mutable_compare_shard()->mutable_units(i)->mutable_quantize()->mutable_weight()->set_tensor("one");
    result.add_source_digests()->set_tensor("one");
    result.mutable_source_digests(i)->set_digest(std::string(16, static_cast<char>('d' + i)));
  }
  const auto mismatches = SourceDigestMismatches(manifest, compare, result);
  ASSERT_THAT(mismatches, SizeIs(1));
  EXPECT_EQ(mismatches[0].tensor(), task.write_shard().units(1).quantize().module());

  const auto texts = [&](const Manifest& text) {
    std::vector<std::string> all;
    const absl::StatusOr<Plan> found = verify(text);
    EXPECT_THAT(found, IsOk());
    if (!found.ok()) return all;
    for (const quern::v1::Mismatch& mismatch : found->summary.mismatches()) all.push_back(mismatch.tensor() + ": " + mismatch.what());
    return all;
  };
  Manifest wrong = manifest;
  wrong.modules[1].stack->offset = task.write_shard().units(1).quantize().outputs(0).size() - 10;
  wrong.modules[2].stack->row_stride = 1;
  EXPECT_THAT(texts(wrong), AllOf(SizeIs(2), testing::Each(HasSubstr("where the manifest says"))));
  wrong = manifest;
  wrong.modules[0].stack->tensor = "ghost";
  EXPECT_THAT(texts(wrong), ElementsAre("ghost: missing, but the manifest lists it"));
}

TEST_F(VerifyPlan, FilesThatAreMissingOrTooMany) {
  QUERN_ASSERT_OK(RemoveFile(Path("config.json")));
  WriteText(Path("extra.txt"), "x");
  EXPECT_THAT(Mismatches(), AllOf(Contains("config.json : missing, but the manifest lists it"), Contains("extra.txt : not in the manifest"),
                                  Contains(HasSubstr("holds no config.json"))));
}

TEST_F(VerifyPlan, FilesOfAnotherSize) {
  Edit("config.json", "\n}", "\n}\n ");
  EXPECT_THAT(Mismatches(), ElementsAre(AllOf(HasSubstr("config.json"), HasSubstr("the manifest says"))));
}

TEST_F(VerifyPlan, IndexThatLacksATensor) {
  Edit("model.safetensors.index.json", "\"model.norm.weight\"", "\"model.morn.weight\"");
  EXPECT_THAT(Mismatches(), ElementsAre(HasSubstr("model.morn.weight")));
}

TEST_F(VerifyPlan, ConfigThatSaysOtherwise) {
  Edit("config.json", "\"num_bits\": 3", "\"num_bits\": 4");
  EXPECT_THAT(Mismatches(), AllOf(SizeIs(14), Contains(HasSubstr("model.layers.0.mlp.up_proj is int3"))));
}

TEST_F(VerifyPlan, ConfigThatTargetsTooMuch) {
  Edit("config.json", "\"lm_head\",\n", "\"lm_haed\",\n");
  Edit("config.json", "up_proj)$\"", "up_proj)$|lm_h\"");
  EXPECT_THAT(Mismatches(), Contains(HasSubstr("lm_head is not quantized, but group_0")));
}

TEST_F(VerifyPlan, ManifestThatListsWhatIsNotThere) {
  manifest_.copied.push_back({"model.ghost.weight", "model.safetensors", std::string(16, 'd'), manifest_.copied[0].shard, "other", "x"});
  manifest_.modules[0].module += "x";
  manifest_.modules[1].source_shape = {64, 128};
  WriteManifest();
  EXPECT_THAT(Mismatches(), AllOf(Contains(HasSubstr("model.ghost.weight: missing")), Contains(HasSubstr("x.weight_packed: missing")),
                                  Contains(HasSubstr("does not account for this tensor")), Contains(HasSubstr("its scheme stores"))));
}

TEST_F(VerifyPlan, AnotherSource) {
  TestCheckpoint other("llama");
  other.AddDenseLayer(0, 64, 96);
  other.AddDenseLayer(1, 64, 128);
  other.Write();
  JobSpec job;
  job.set_operation(quern::v1::VERIFY);
  job.set_output(output_.path());
  job.mutable_verify()->set_against(other.path());
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(job, false));
  std::vector<std::string> texts;
  for (const quern::v1::Mismatch& mismatch : plan.summary.mismatches()) texts.push_back(mismatch.tensor() + ": " + mismatch.what());
  EXPECT_THAT(texts, AllOf(Contains(HasSubstr("another size or header")),
                           Contains(HasSubstr("model.layers.1.mlp.up_proj.weight: the source does not have")),
                           Contains(HasSubstr("lm_head.weight: the source does not have"))));
}

TEST_F(VerifyPlan, WithoutAManifestIsRefused) {
  QUERN_ASSERT_OK(RemoveFile(Path(kManifestName)));
  EXPECT_THAT(Verify(), StatusIs(kInvalid, HasSubstr("holds no quern_manifest.json")));
}

TEST_F(VerifyPlan, ManifestThatCannotBeReadIsAMismatch) {
  WriteText(Path(kManifestName), "{");
  EXPECT_THAT(Mismatches(), ElementsAre(HasSubstr("quern_manifest.json : ")));
}

TEST_F(VerifyPlan, ManifestThatContradictsItself) {
  WriteText(Path("quern_recipe.yaml"), manifest_.recipe);
  AddFile("quern_recipe.yaml");
  WriteManifest();
  EXPECT_THAT(Mismatches(/*against=*/true), IsEmpty());
  manifest_.recipe += "# other\n";
  manifest_.numerics_version = 99;
  manifest_.modules[0].source_file = "elsewhere.safetensors";
  WriteManifest();
  EXPECT_THAT(Mismatches(), AllOf(SizeIs(3), Contains(HasSubstr("recipe is not the one in quern_recipe.yaml")),
                                  Contains(HasSubstr("numerics_version is 99")),
                                  Contains(HasSubstr("elsewhere.safetensors is not among its source_files"))));
  EXPECT_THAT(Mismatches(/*against=*/true), Contains(HasSubstr("the source has it in model.safetensors")));
}

}  // namespace
}  // namespace quern::daemon
