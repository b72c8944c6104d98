#include "daemon/publish/publish.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/digest.h"
#include "base/dtype.h"
#include "base/status_matchers.h"
#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"
#include "daemon/manifest/manifest.h"

namespace quern::daemon {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

using Tree = std::map<std::string, std::string>;

// Relative path -> content of everything below `root`; directories end with a slash.
Tree ReadTree(const std::string& root) {
  Tree tree;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    const std::string name = entry.path().lexically_relative(root).string();
    if (entry.is_directory()) {
      tree[name + "/"] = "";
    } else {
      tree[name] = ReadFileToString(entry.path().string()).value();
    }
  }
  return tree;
}

Tree WithoutQuern(Tree tree) {
  std::erase_if(tree, [](const auto& entry) { return absl::StartsWith(entry.first, ".quern/"); });
  return tree;
}

// A job with finished shards. Everything follows from (seed, shards).
struct TestJob {
  quern::v1::JobSpec spec;
  quern::v1::PlanSummary plan;
  std::vector<CommittedTask> tasks;
  std::vector<std::string> contents;  // of the shards
  int loads_until_failure = -1;

  PublishRequest Request() {
    PublishRequest request;
    request.spec = &spec;
    request.plan = &plan;
    request.tasks = tasks.size();
    request.load_task = [this](uint32_t index) -> absl::StatusOr<CommittedTask> {
      if (loads_until_failure == 0) return absl::UnavailableError("store is gone");
      if (loads_until_failure > 0) --loads_until_failure;
      return tasks.at(index);
    };
    request.run_json = absl::StrCat("{\"identity\": \"", HexDigest(plan.identity()), "\", \"events\": []}\n");
    return request;
  }

  absl::Status Publish() { return PublishJob(Request()); }

  void WriteAttempts() const {
    QUERN_ASSERT_OK(MakeDirectories(AttemptDirectory(spec.output())));
    for (size_t i = 0; i < tasks.size(); ++i) {
      QUERN_ASSERT_OK(WriteFileDurably(AttemptPath(spec.output(), i, tasks[i].attempt), contents[i]));
    }
    // An attempt that came to nothing.
    QUERN_ASSERT_OK(WriteFileDurably(AttemptPath(spec.output(), 0, 99), "partial"));
  }
};

class PublishTest : public testing::Test {
 protected:
  void SetUp() override {
    // Syncing a memory filesystem costs nothing, and the crash tests sync thousands of times.
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 1);
    QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("publish_test"));
    dir_.emplace(std::move(dir));
    source_ = Path("source");
    MakeSource(source_);
    out_ = Path("out");
  }

  std::string Path(absl::string_view name) const { return JoinPath(dir_->path(), name); }
  std::string Out(absl::string_view name) const { return JoinPath(out_, name); }

  static void Write(const std::string& path, absl::string_view content) {
    QUERN_ASSERT_OK(MakeDirectories(DirName(path)));
    QUERN_ASSERT_OK(WriteFileDurably(path, content));
  }

  static void MakeSource(const std::string& source) {
    Write(JoinPath(source, "config.json"), "{\n  \"model_type\": \"llama\",\n  \"limit\": Infinity,\n  \"hidden_size\": 64\n}\n");
    Write(
        JoinPath(source, "model.safetensors.index.json"),
        "{\"metadata\": {\"total_size\": 1, \"total_parameters\": 12345}, \"weight_map\": {\"a\": \"model-00001-of-00001.safetensors\"}}");
    Write(JoinPath(source, "tokenizer.json"), std::string(70'000, 't'));
    Write(JoinPath(source, "code/modeling.py"), "pass\n");
    Write(JoinPath(source, "code/deep/x.txt"), "");
  }

  TestJob MakeJob(const std::string& out, uint32_t shards, uint64_t seed) const {
    TestJob job;
    job.spec.set_operation(quern::v1::QUANTIZE);
    job.spec.mutable_quantize()->set_source(source_);
    job.spec.set_output(out);
    job.plan.set_source(source_);
    job.plan.set_resolved_recipe("scheme: W4A16\n");
    job.plan.set_quantization_config("{\"quant_method\": \"compressed-tensors\"}");
    job.plan.set_numerics_version(1);
    job.plan.set_max_shard_size(1 << 20);
    job.plan.set_identity(Sha256Of(absl::StrCat("identity", seed)));
    for (const char* name : {"code/deep/x.txt", "code/modeling.py", "tokenizer.json"}) job.plan.add_side_files(name);
    quern::v1::SourceFile source_file;
    source_file.set_path(JoinPath(source_, "model-00001-of-00001.safetensors"));
    source_file.set_size(1000);
    source_file.set_mtime_ns(12345);
    source_file.set_header_sha256(Sha256Of("header"));
    *job.plan.add_source_files() = source_file;
    quern::v1::TensorFate* dropped = job.plan.add_dropped();
    dropped->set_tensor("inv_freq");
    dropped->set_reason("computed at load");
    for (uint32_t i = 0; i < shards; ++i) {
      CommittedTask task;
      task.attempt = 1 + i;
      task.spec.set_index(i);
      char name[64];
      snprintf(name, sizeof(name), "model-%05u-of-%05u.safetensors", i + 1, shards);
      task.spec.set_label(shards == 1 ? "model.safetensors" : name);
      *task.spec.add_source_files() = source_file;
      const std::string module = absl::StrCat("model.layers.", i, ".mlp.up_proj");
      const std::string norm = absl::StrCat("model.layers.", i, ".input_layernorm.weight");
      const std::vector<checkpoint::TensorInfo> tensors = {{absl::StrCat(module, ".weight_packed"), DType::kI32, {8, 2}, 0, 64},
                                                           {absl::StrCat(module, ".weight_scale"), DType::kBF16, {8, 1}, 64, 80},
                                                           {norm, DType::kBF16, {8}, 80, 96}};
      std::string content = checkpoint::BuildSafetensorsHeader(tensors);
      task.result.set_header_sha256(Sha256Of(content));
      const uint64_t start = content.size();
      for (int byte = 0; byte < 96; ++byte) content.push_back(static_cast<char>(seed * 31 + i * 7 + byte));
      task.result.set_file_size(content.size());
      task.result.set_sha256(Sha256Of(content));
      task.result.mutable_times()->set_wall_seconds(seed);
      quern::v1::WriteShard* work = task.spec.mutable_write_shard();
      const auto output = [&](const checkpoint::TensorInfo& info) {
        quern::v1::OutputTensor tensor;
        tensor.set_name(info.name);
        tensor.set_offset(start + info.begin);
        tensor.set_size(info.bytes());
        return tensor;
      };
      quern::v1::QuantizeUnit* unit = work->add_units()->mutable_quantize();
      unit->set_module(module);
      unit->set_scheme("int4");
      unit->set_reason("target mlp");
      unit->set_role("mlp");
      unit->mutable_weight()->set_tensor(absl::StrCat(module, ".weight"));
      unit->mutable_weight()->set_dtype("BF16");
      unit->mutable_weight()->set_rows(8);
      unit->mutable_weight()->set_cols(16);
      *unit->add_outputs() = output(tensors[0]);
      *unit->add_outputs() = output(tensors[1]);
      quern::v1::CopyUnit* copy = work->add_units()->mutable_copy();
      copy->mutable_source()->set_tensor(norm);
      copy->set_reason("not 2-D");
      *copy->mutable_output() = output(tensors[2]);
      for (const std::string& tensor : {absl::StrCat(module, ".weight"), norm}) {
        quern::v1::ViewDigest* digest = task.result.add_source_digests();
        digest->set_tensor(tensor);
        digest->set_digest(Xxh3_128Of(absl::StrCat(tensor, seed)));
      }
      quern::v1::ModuleError* error = task.result.add_errors();
      error->set_module(module);
      error->set_count(128);
      error->set_sum_squared_error(0.1 * seed);
      job.tasks.push_back(std::move(task));
      job.contents.push_back(std::move(content));
    }
    return job;
  }

  TestJob MakeSynthesizeJob(const std::string& out, uint32_t shards) const {
    TestJob job = MakeJob(out, shards, 5);
    job.spec.set_operation(quern::v1::SYNTHESIZE);
    job.spec.mutable_synthesize()->set_family("llama");
    job.plan.Clear();
    job.plan.set_identity(Sha256Of(absl::StrCat("synthetic", shards)));
    job.plan.set_synthetic_config("{\"model_type\": \"llama\"}\n");
    for (CommittedTask& task : job.tasks) {
      quern::v1::WriteShard work;
      for (const quern::v1::ShardUnit& unit : task.spec.write_shard().units()) {
        for (const quern::v1::OutputTensor& output : unit.quantize().outputs())
          *work.add_units()->mutable_generate()->mutable_output() = output;
        if (unit.has_copy()) *work.add_units()->mutable_generate()->mutable_output() = unit.copy().output();
      }
      *task.spec.mutable_write_shard() = work;
      task.result.clear_errors();
      task.result.clear_source_digests();
    }
    return job;
  }

  std::optional<TempDir> dir_;
  std::string source_;
  std::string out_;
};

TEST_F(PublishTest, MakesACheckpointDirectory) {
  TestJob job = MakeJob(out_, 3, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_THAT(ListDirectory(out_),
              IsOkAndHolds(ElementsAre(".quern", "code", "config.json", "model-00001-of-00003.safetensors",
                                       "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
                                       "model.safetensors.index.json", "quern_manifest.json", "quern_recipe.yaml", "tokenizer.json")));
  EXPECT_THAT(ListDirectory(Out(".quern")), IsOkAndHolds(ElementsAre("run.json")));
  EXPECT_THAT(ReadFileToString(Out("model-00002-of-00003.safetensors")), IsOkAndHolds(job.contents[1]));
  EXPECT_THAT(ReadFileToString(Out("quern_recipe.yaml")), IsOkAndHolds("scheme: W4A16\n"));
  EXPECT_THAT(ReadFileToString(Out("code/modeling.py")), IsOkAndHolds("pass\n"));
  EXPECT_THAT(ReadFileToString(Out("config.json")),
              IsOkAndHolds(AllOf(HasSubstr("\"limit\": Infinity"), HasSubstr("\"quant_method\": \"compressed-tensors\""))));
  EXPECT_THAT(FinishedIdentity(out_), IsOkAndHolds(job.plan.identity()));

  QUERN_ASSERT_OK_AND_ASSIGN(const std::string index_text, ReadFileToString(Out("model.safetensors.index.json")));
  QUERN_ASSERT_OK_AND_ASSIGN(const checkpoint::ShardIndex index, checkpoint::ParseShardIndex(index_text, "index"));
  EXPECT_EQ(index.total_size, 3 * 96u);
  EXPECT_EQ(index.total_parameters, "12345");
  EXPECT_THAT(index.weight_map, SizeIs(9));
  EXPECT_EQ(index.weight_map.at("model.layers.1.mlp.up_proj.weight_scale"), "model-00002-of-00003.safetensors");
}

TEST_F(PublishTest, ModelOptHasAFileOfItsOwn) {
  TestJob job = MakeJob(out_, 2, 1);
  job.spec.mutable_quantize()->set_export_format("modelopt");
  job.plan.set_hf_quant_config("{\"producer\": {}}\n");
  Write(Out("hf_quant_config.json"), "foreign");
  Write(Out(".quern/owner.json"), "{}");
  job.WriteAttempts();
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("hf_quant_config.json")));
  QUERN_ASSERT_OK(RemoveFile(Out("hf_quant_config.json")));
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_THAT(ReadFileToString(Out("hf_quant_config.json")), IsOkAndHolds("{\"producer\": {}}\n"));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, ReadFileToString(Out(kManifestName)));
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(text, "m"));
  EXPECT_EQ(manifest.export_format, "modelopt");
  EXPECT_TRUE(std::any_of(manifest.files.begin(), manifest.files.end(), [](const ManifestFile& file) {
    return file.name == "hf_quant_config.json" && file.sha256 == Sha256Of("{\"producer\": {}}\n");
  }));
  // Another export in its place leaves none behind.
  TestJob other = MakeJob(out_, 2, 2);
  other.WriteAttempts();
  QUERN_ASSERT_OK(other.Publish());
  EXPECT_FALSE(FileExists(Out("hf_quant_config.json")));
}

TEST_F(PublishTest, PlainWeightsHaveNeitherRecipeNorQuantizationConfig) {
  Write(JoinPath(source_, "config.json"),
        "{\n  \"limit\": Infinity,\n  \"quantization_config\": {\"quant_method\": \"fp8\"},\n  \"text_config\": {\"a\": 1, "
        "\"quantization_config\": {}}\n}\n");
  TestJob job = MakeJob(out_, 1, 1);
  job.spec.mutable_dequantize()->set_source(source_);
  job.spec.set_operation(quern::v1::DEQUANTIZE);
  job.plan.clear_resolved_recipe();
  job.plan.clear_quantization_config();
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_THAT(ReadFileToString(Out("config.json")), IsOkAndHolds("{\n  \"limit\": Infinity,\n  \"text_config\": {\"a\": 1}\n}\n"));
  EXPECT_FALSE(FileExists(Out("quern_recipe.yaml")));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, ReadFileToString(Out(kManifestName)));
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(text, "m"));
  EXPECT_EQ(manifest.export_format, "plain");
  EXPECT_EQ(manifest.recipe, "");
  EXPECT_THAT(manifest.modules, SizeIs(1));
}

TEST_F(PublishTest, ManifestNamesFilesOfModuleInputs) {
  TestJob job = MakeJob(out_, 1, 1);
  quern::v1::SourceFile& input = *job.plan.add_input_files();
  input.set_path("/elsewhere/scales.safetensors");
  input.set_size(77);
  input.set_content_sha256(Sha256Of("scales"));
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, ReadFileToString(Out(kManifestName)));
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(text, "m"));
  ASSERT_THAT(manifest.inputs, SizeIs(1));
  EXPECT_EQ(manifest.inputs[0].name, "scales.safetensors") << "where it lies is no part of the result";
  EXPECT_EQ(manifest.inputs[0].size, 77u);
  EXPECT_EQ(manifest.inputs[0].sha256, Sha256Of("scales"));
}

TEST_F(PublishTest, ManifestListsEveryFileAndTensor) {
  TestJob job = MakeJob(out_, 2, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, ReadFileToString(Out(kManifestName)));
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(text, "m"));
  Tree listed;
  for (const ManifestFile& file : manifest.files) {
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string content, ReadFileToString(Out(file.name)));
    EXPECT_EQ(file.size, content.size()) << file.name;
    EXPECT_EQ(file.sha256, Sha256Of(content)) << file.name;
    listed[file.name] = content;
  }
  Tree there = WithoutQuern(ReadTree(out_));
  there.erase(kManifestName);
  std::erase_if(there, [](const auto& entry) { return absl::EndsWith(entry.first, "/"); });
  EXPECT_EQ(listed, there);
  ASSERT_THAT(manifest.modules, SizeIs(2));
  EXPECT_EQ(manifest.modules[1].module, "model.layers.1.mlp.up_proj");
  EXPECT_EQ(manifest.modules[1].source_file, "model-00001-of-00001.safetensors");
  EXPECT_EQ(manifest.modules[1].source_shape, (std::vector<uint64_t>{8, 16}));
  EXPECT_EQ(manifest.modules[1].source_digest, Xxh3_128Of("model.layers.1.mlp.up_proj.weight1"));
  EXPECT_EQ(manifest.modules[1].error.count(), 128u);
  ASSERT_THAT(manifest.copied, SizeIs(2));
  EXPECT_EQ(manifest.copied[0].role, "norms");
  EXPECT_EQ(manifest.copied[0].reason, "not 2-D");
  ASSERT_THAT(manifest.dropped, SizeIs(1));
  EXPECT_EQ(manifest.dropped[0].tensor, "inv_freq");
  EXPECT_EQ(manifest.source_files[0].name, "model-00001-of-00001.safetensors");
  EXPECT_EQ(manifest.recipe, "scheme: W4A16\n");
}

TEST_F(PublishTest, PlaceTimesAndAttemptsLeaveNoTrace) {
  TestJob job = MakeJob(out_, 2, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  const Tree expected = WithoutQuern(ReadTree(out_));

  source_ = Path("another/place");
  MakeSource(source_);
  TestJob again = MakeJob(Path("elsewhere"), 2, 1);
  for (CommittedTask& task : again.tasks) {
    task.attempt += 5;
    task.result.mutable_times()->set_wall_seconds(1e6);
    task.result.set_kernel_target("scalar");
    task.result.set_peak_rss(1);
  }
  again.plan.mutable_source_files(0)->set_mtime_ns(1);
  again.WriteAttempts();
  QUERN_ASSERT_OK(again.Publish());
  EXPECT_EQ(WithoutQuern(ReadTree(Path("elsewhere"))), expected);
}

TEST_F(PublishTest, OneShardHasNoIndex) {
  TestJob job = MakeJob(out_, 1, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_TRUE(FileExists(Out("model.safetensors")));
  EXPECT_FALSE(FileExists(Out("model.safetensors.index.json")));
}

TEST_F(PublishTest, SyntheticCheckpointIsPlain) {
  TestJob job = MakeSynthesizeJob(out_, 2);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_THAT(ListDirectory(out_), IsOkAndHolds(ElementsAre(".quern", "config.json", "model-00001-of-00002.safetensors",
                                                            "model-00002-of-00002.safetensors", "model.safetensors.index.json")));
  EXPECT_THAT(ListDirectory(Out(".quern")), IsOkAndHolds(ElementsAre("run.json")));
  EXPECT_THAT(ReadFileToString(Out("config.json")), IsOkAndHolds(job.plan.synthetic_config()));
  EXPECT_THAT(FinishedIdentity(out_), IsOkAndHolds(job.plan.identity()));
  QUERN_ASSERT_OK(RemoveFile(Out("model-00002-of-00002.safetensors")));
  EXPECT_THAT(FinishedIdentity(out_), StatusIs(absl::StatusCode::kNotFound, HasSubstr("model-00002-of-00002.safetensors is missing")));
}

TEST_F(PublishTest, SyntheticCheckpointIsReplacedAsAWhole) {
  TestJob old = MakeSynthesizeJob(out_, 3);
  old.WriteAttempts();
  QUERN_ASSERT_OK(old.Publish());
  QUERN_EXPECT_OK(CheckOutputUsable(out_, /*overwrite=*/true));
  Write(Out("notes.txt"), "mine");
  TestJob job = MakeSynthesizeJob(out_, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_THAT(ListDirectory(out_), IsOkAndHolds(ElementsAre(".quern", "config.json", "model.safetensors", "notes.txt")));
}

TEST_F(PublishTest, FilesOfSomebodyElseAreNotReplaced) {
  for (const char* name :
       {"tokenizer.json", "config.json", "quern_recipe.yaml", "model.safetensors.index.json", "model-00001-of-00002.safetensors"}) {
    SCOPED_TRACE(name);
    QUERN_ASSERT_OK(RemoveTree(out_));
    TestJob job = MakeJob(out_, 2, 1);
    job.WriteAttempts();
    Write(Out(name), "mine");
    EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kAlreadyExists, AllOf(HasSubstr(name), HasSubstr("not written by Quern"))));
    EXPECT_THAT(ReadFileToString(Out(name)), IsOkAndHolds("mine"));
    QUERN_ASSERT_OK(RemoveFile(Out(name)));
    QUERN_EXPECT_OK(job.Publish());
  }
}

TEST_F(PublishTest, OverwriteDoesNotReplaceAFileThatTheOldManifestDoesNotName) {
  TestJob old = MakeJob(out_, 2, 1);
  old.plan.clear_side_files();
  old.WriteAttempts();
  QUERN_ASSERT_OK(old.Publish());
  Write(Out("tokenizer.json"), "mine");
  TestJob job = MakeJob(out_, 2, 2);
  job.WriteAttempts();
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("tokenizer.json")));
  EXPECT_THAT(FinishedIdentity(out_), IsOkAndHolds(old.plan.identity())) << "the old result stands as it was";
}

TEST_F(PublishTest, VerificationPublishesNothing) {
  TestJob job = MakeJob(out_, 2, 1);
  job.spec.set_operation(quern::v1::VERIFY);
  QUERN_EXPECT_OK(job.Publish());
  EXPECT_FALSE(FileExists(out_));
}

TEST_F(PublishTest, SlicesOfOneTensorHaveTheirOwnDigests) {
  TestJob job = MakeJob(out_, 1, 1);
  CommittedTask& task = job.tasks[0];
  quern::v1::ShardUnit second = task.spec.write_shard().units(0);
  second.mutable_quantize()->set_module("second");
  second.mutable_quantize()->clear_outputs();
  *task.spec.mutable_write_shard()->add_units() = second;
  quern::v1::ViewDigest* digest = task.result.add_source_digests();
  digest->set_tensor(second.quantize().weight().tensor());
  digest->set_digest(Xxh3_128Of("second slice"));
  task.result.add_errors()->set_module("second");
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string text, ReadFileToString(Out(kManifestName)));
  QUERN_ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(text, "m"));
  ASSERT_THAT(manifest.modules, SizeIs(2));
  EXPECT_EQ(manifest.modules[1].source_digest, Xxh3_128Of("second slice"));
  EXPECT_NE(manifest.modules[0].source_digest, manifest.modules[1].source_digest);
}

TEST_F(PublishTest, ShardOfAnotherSizeIsDataLoss) {
  TestJob job = MakeJob(out_, 2, 1);
  job.WriteAttempts();
  Write(AttemptPath(out_, 1, job.tasks[1].attempt), "short");
  EXPECT_THAT(job.Publish(),
              StatusIs(absl::StatusCode::kDataLoss, AllOf(HasSubstr("model-00002-of-00002.safetensors"), HasSubstr("5 bytes"))));
  EXPECT_FALSE(FileExists(Out("model.safetensors.index.json")));
}

TEST_F(PublishTest, MissingShardIsDataLoss) {
  TestJob job = MakeJob(out_, 2, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(RemoveFile(AttemptPath(out_, 1, job.tasks[1].attempt)));
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("model-00002-of-00002.safetensors is gone")));
}

TEST_F(PublishTest, ForeignShardInPlaceIsDataLoss) {
  TestJob job = MakeJob(out_, 2, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(RemoveFile(AttemptPath(out_, 1, job.tasks[1].attempt)));
  std::string other = job.contents[1];
  other[other.find("BF16")] = 'X';
  Write(Out("model-00002-of-00002.safetensors"), other);
  Write(Out(".quern/run.json"), R"({"state": "publishing", "publishing": ["model-00002-of-00002.safetensors"]})");
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("another header")));
}

TEST_F(PublishTest, MissingSideFileStopsAndGoesOnWhenItIsBack) {
  TestJob job = MakeJob(out_, 2, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(RenameFile(JoinPath(source_, "tokenizer.json"), Path("kept")));
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr("step 3"), HasSubstr("tokenizer.json"))));
  EXPECT_FALSE(FileExists(Out("config.json")));
  QUERN_EXPECT_OK(CheckOutputUsable(out_, false));
  QUERN_ASSERT_OK(RenameFile(Path("kept"), JoinPath(source_, "tokenizer.json")));
  QUERN_EXPECT_OK(job.Publish());
}

TEST_F(PublishTest, FifoInPlaceOfASideFileIsRefused) {
  TestJob job = MakeJob(out_, 1, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(RemoveFile(JoinPath(source_, "tokenizer.json")));
  ASSERT_EQ(mkfifo(JoinPath(source_, "tokenizer.json").c_str(), 0600), 0);
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no regular file")));
}

TEST_F(PublishTest, TheSourceIsNeverTheOutput) {
  TestJob job = MakeJob(source_, 2, 1);
  job.WriteAttempts();
  const Tree before = ReadTree(source_);
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the source itself")));
  EXPECT_EQ(ReadTree(source_), before);
}

TEST_F(PublishTest, OwnFilesOfASourceThatWeMadeAreNotCopied) {
  Write(JoinPath(source_, kManifestName), "old");
  TestJob job = MakeJob(out_, 1, 1);
  job.plan.add_side_files(kManifestName);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_THAT(ReadFileToString(Out(kManifestName)), IsOkAndHolds(HasSubstr("\"modules\"")));
}

TEST_F(PublishTest, OverwriteRemovesWhatTheOldManifestNamesAndNothingElse) {
  TestJob old = MakeJob(out_, 3, 1);
  old.WriteAttempts();
  QUERN_ASSERT_OK(old.Publish());
  Write(Out("notes.txt"), "mine");
  Write(Out("code/deep/mine.txt"), "mine");

  TestJob job = MakeJob(out_, 2, 2);
  job.plan.clear_side_files();
  job.plan.add_side_files("tokenizer.json");
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  const Tree tree = WithoutQuern(ReadTree(out_));
  std::set<std::string> names;
  for (const auto& [name, content] : tree) names.insert(name);
  EXPECT_EQ(names, (std::set<std::string>{"code/", "code/deep/", "code/deep/mine.txt", "config.json", "model-00001-of-00002.safetensors",
                                          "model-00002-of-00002.safetensors", "model.safetensors.index.json", "notes.txt",
                                          "quern_manifest.json", "quern_recipe.yaml", "tokenizer.json"}));
}

TEST_F(PublishTest, OldFilesBehindALinkAreNotOurs) {
  TestJob old = MakeJob(out_, 1, 1);
  old.WriteAttempts();
  QUERN_ASSERT_OK(old.Publish());
  QUERN_ASSERT_OK(RenameFile(Out("code"), Path("behind")));
  ASSERT_EQ(symlink(Path("behind").c_str(), Out("code").c_str()), 0);
  TestJob job = MakeJob(out_, 1, 2);
  job.plan.clear_side_files();
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_TRUE(FileExists(Path("behind/modeling.py")));
}

TEST_F(PublishTest, NothingIsWrittenOrRemovedBehindALinkWhileTheOutputIsClaimed) {
  TestJob job = MakeJob(out_, 2, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK_AND_ASSIGN(const OutputClaim claim, OutputClaim::Acquire(out_, "me", "jobs/1"));
  const std::string away = Path("away"), victim = Path("victim");
  Write(JoinPath(victim, ".quern/attempts/0.99"), "mine");
  Write(JoinPath(victim, "attempts/0.99"), "mine");
  Write(JoinPath(victim, "publish/0"), "mine");
  Write(JoinPath(victim, "0.99"), "mine");
  const auto files = [&victim] {
    std::string found;
    for (const char* directory : {"", ".quern", ".quern/attempts", "attempts", "publish"}) {
      absl::StrAppend(&found, absl::StrJoin(ListDirectory(JoinPath(victim, directory)).value(), ","), ";");
    }
    return found;
  };
  const std::string before = files();
  for (const char* name : {".quern/attempts", ".quern", ""}) {
    const std::string planted = *name == '\0' ? out_ : Out(name);
    ASSERT_EQ(rename(planted.c_str(), away.c_str()), 0);
    ASSERT_EQ(symlink(victim.c_str(), planted.c_str()), 0);
    EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("symbolic link"))) << planted;
    EXPECT_EQ(files(), before) << planted;
    ASSERT_EQ(unlink(planted.c_str()), 0);
    ASSERT_EQ(rename(away.c_str(), planted.c_str()), 0);
  }
  // A side file's directory.
  ASSERT_EQ(symlink(victim.c_str(), Out("code").c_str()), 0);
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("symbolic link")));
  EXPECT_EQ(files(), before);
  ASSERT_EQ(unlink(Out("code").c_str()), 0);
  QUERN_EXPECT_OK(job.Publish());
}

TEST_F(PublishTest, FullDiskSaysWhatIsNeededAndGoesOnWhenThereIsSpace) {
  const std::string mount_point = Path("small");
  QUERN_ASSERT_OK(MakeDirectories(mount_point));
  if (mount("tmpfs", mount_point.c_str(), "tmpfs", 0, "size=192k") != 0) {
    ASSERT_EQ(getenv("CI"), nullptr) << "mounting a tmpfs needs root";
    GTEST_SKIP() << "mounting a tmpfs needs root";
  }
  const std::string out = JoinPath(mount_point, "out");
  Write(JoinPath(source_, "tokenizer.json"), std::string(300'000, 't'));
  TestJob job = MakeJob(out, 2, 1);
  job.WriteAttempts();
  EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kResourceExhausted,
                                      AllOf(HasSubstr("disk full"), HasSubstr("publishing needs about 30"), HasSubstr("are free"))));
  EXPECT_FALSE(FileExists(JoinPath(out, ".quern/publish")));
  EXPECT_EQ(mount("tmpfs", mount_point.c_str(), "tmpfs", MS_REMOUNT, "size=4m"), 0);
  QUERN_EXPECT_OK(job.Publish());
  EXPECT_THAT(FinishedIdentity(out), IsOkAndHolds(job.plan.identity()));
  EXPECT_EQ(umount(mount_point.c_str()), 0);
}

// --- Crashes. A child publishes and is killed before its n-th change of the filesystem, for every n; then the job is published again.

bool ChangesFilesystem(const __ptrace_syscall_info& info) {
  switch (info.entry.nr) {
    case SYS_openat:
      return (info.entry.args[2] & O_CREAT) != 0;
    case SYS_pwrite64:
    case SYS_fsync:
    case SYS_unlinkat:
    case SYS_mkdirat:
    case SYS_renameat2:
#ifdef SYS_renameat
    case SYS_renameat:
#endif
#ifdef SYS_rename
    case SYS_rename:
    case SYS_unlink:
    case SYS_mkdir:
    case SYS_rmdir:
#endif
      return true;
    default:
      return false;
  }
}

enum class ChildEnd { kKilled, kDone, kFailed, kCannotTrace };

// Runs `work` in a child and kills it as it is about to change the filesystem for the `n`-th time (from 0).
ChildEnd RunAndKill(int n, const std::function<bool()>& work) {
  const pid_t child = fork();
  if (child < 0) return ChildEnd::kCannotTrace;
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
    raise(SIGSTOP);
    _exit(work() ? 0 : 1);
  }
  int status = 0;
  const auto kill_child = [&] {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  };
  if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return ChildEnd::kCannotTrace;
  if (ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) != 0) {
    kill_child();
    return ChildEnd::kCannotTrace;
  }
  int changes = 0;
  while (true) {
    if (ptrace(PTRACE_SYSCALL, child, nullptr, nullptr) != 0 || waitpid(child, &status, 0) != child) return ChildEnd::kCannotTrace;
    if (WIFEXITED(status)) return WEXITSTATUS(status) == 0 ? ChildEnd::kDone : ChildEnd::kFailed;
    if (WIFSIGNALED(status)) return ChildEnd::kFailed;
    if (WSTOPSIG(status) != (SIGTRAP | 0x80)) continue;
    __ptrace_syscall_info info = {};
    if (ptrace(static_cast<__ptrace_request>(PTRACE_GET_SYSCALL_INFO), child, sizeof(info), &info) <= 0) {
      kill_child();
      return ChildEnd::kCannotTrace;
    }
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY || !ChangesFilesystem(info) || changes++ < n) continue;
    kill_child();
    return ChildEnd::kKilled;
  }
}

bool LooksLikeACheckpoint(const Tree& tree) {
  return tree.count("config.json") > 0 && (tree.count("model.safetensors.index.json") > 0 || tree.count("model.safetensors") > 0);
}

class PublishCrashTest : public PublishTest {
 protected:
  // `make` gives the job for an output; `before` is what stands in OUT before the job's attempts, or empty.
  void KillEverywhere(const std::function<TestJob(const std::string&)>& make, const std::string& before) {
    const auto prepare = [&](const std::string& out) {
      if (!before.empty()) std::filesystem::copy(before, out, std::filesystem::copy_options::recursive);
      TestJob job = make(out);
      job.WriteAttempts();
      return job;
    };
    // As the coordinator does: publish under the claim. A killed one leaves it behind.
    const auto publish = [](TestJob* job) -> absl::Status {
      absl::StatusOr<OutputClaim> claim = OutputClaim::Acquire(job->spec.output(), "test", "jobs/1");
      return claim.ok() ? job->Publish() : claim.status();
    };
    TestJob reference = prepare(Path("reference"));
    const Tree old_tree = WithoutQuern(ReadTree(Path("reference")));
    QUERN_ASSERT_OK(publish(&reference));
    const Tree expected = ReadTree(Path("reference"));
    constexpr int kEnough = 10'000;
    int n = 0;
    for (; n < kEnough && !HasFailure(); ++n) {
      SCOPED_TRACE(absl::StrCat("killed before change ", n));
      const std::string out = Path("killed");
      QUERN_ASSERT_OK(RemoveTree(out));
      TestJob job = prepare(out);
      const ChildEnd end = RunAndKill(n, [&job, &out] {
        const absl::StatusOr<OutputClaim> claim = OutputClaim::Acquire(out, "test", "jobs/1");
        if (!claim.ok() || !job.Publish().ok()) return false;
        _exit(0);  // the claim is given back only once the job's end is recorded, which is after all that is tested here
      });
      if (end == ChildEnd::kCannotTrace) {
        ASSERT_EQ(getenv("CI"), nullptr) << "tracing a child is not allowed";
        GTEST_SKIP() << "tracing a child is not allowed here";
      }
      ASSERT_NE(end, ChildEnd::kFailed);
      if (end == ChildEnd::kDone) break;
      const Tree left = WithoutQuern(ReadTree(out));
      if (LooksLikeACheckpoint(left)) {
        EXPECT_TRUE(left == old_tree || left == WithoutQuern(expected)) << "half a checkpoint looks like a whole one";
      }
      QUERN_EXPECT_OK(CheckOutputUsable(out, /*overwrite=*/true));
      if (!FinishedIdentity(out).ok()) {
        QUERN_EXPECT_OK(CheckOutputUsable(out, /*overwrite=*/false));
      }
      QUERN_ASSERT_OK(publish(&job));
      ASSERT_EQ(ReadTree(out), expected);
    }
    EXPECT_GT(n, 30);
    EXPECT_LT(n, kEnough);
  }
};

TEST_F(PublishCrashTest, NewOutput) {
  KillEverywhere([this](const std::string& out) { return MakeJob(out, 3, 1); }, "");
}

TEST_F(PublishCrashTest, OneShard) {
  KillEverywhere([this](const std::string& out) { return MakeJob(out, 1, 1); }, "");
}

TEST_F(PublishCrashTest, SyntheticCheckpoint) {
  KillEverywhere([this](const std::string& out) { return MakeSynthesizeJob(out, 2); }, "");
}

TEST_F(PublishCrashTest, OverAnOldSyntheticCheckpoint) {
  TestJob old = MakeSynthesizeJob(Path("old"), 3);
  old.WriteAttempts();
  QUERN_ASSERT_OK(old.Publish());
  KillEverywhere([this](const std::string& out) { return MakeJob(out, 3, 2); }, Path("old"));
}

// Names and sizes of the old shards are those of the new ones.
TEST_F(PublishCrashTest, OverAnOldResultOfTheSameNames) {
  TestJob old = MakeJob(Path("old"), 3, 1);
  old.WriteAttempts();
  QUERN_ASSERT_OK(old.Publish());
  KillEverywhere([this](const std::string& out) { return MakeJob(out, 3, 2); }, Path("old"));
}

TEST_F(PublishCrashTest, OverAnOldResultWithOtherFiles) {
  TestJob old = MakeJob(Path("old"), 3, 1);
  old.WriteAttempts();
  QUERN_ASSERT_OK(old.Publish());
  KillEverywhere(
      [this](const std::string& out) {
        TestJob job = MakeJob(out, 1, 2);
        job.plan.clear_side_files();
        return job;
      },
      Path("old"));
}

TEST_F(PublishCrashTest, PublishedTwiceIsTheSame) {
  TestJob job = MakeJob(out_, 3, 1);
  job.WriteAttempts();
  QUERN_ASSERT_OK(job.Publish());
  const Tree expected = ReadTree(out_);
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_EQ(ReadTree(out_), expected);
}

TEST_F(PublishCrashTest, StoreThatFailsAtAnyLoad) {
  TestJob reference = MakeJob(Path("reference"), 3, 1);
  reference.WriteAttempts();
  QUERN_ASSERT_OK(reference.Publish());
  const Tree expected = ReadTree(Path("reference"));
  TestJob job = MakeJob(out_, 3, 1);
  job.WriteAttempts();
  // Three passes over three tasks.
  for (int loads = 0; loads < 9; ++loads) {
    job.loads_until_failure = loads;
    EXPECT_THAT(job.Publish(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("store is gone"))) << loads;
    EXPECT_FALSE(FileExists(Out("config.json")));
  }
  job.loads_until_failure = -1;
  QUERN_ASSERT_OK(job.Publish());
  EXPECT_EQ(ReadTree(out_), expected);
}

}  // namespace
}  // namespace quern::daemon
