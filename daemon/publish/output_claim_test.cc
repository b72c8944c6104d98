#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status_matchers.h"
#include "daemon/manifest/manifest.h"
#include "daemon/publish/publish.h"

namespace quern::daemon {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class OutputClaimTest : public testing::Test {
 protected:
  void SetUp() override {
    QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("claim_test"));
    dir_.emplace(std::move(dir));
    out_ = JoinPath(dir_->path(), "out");
  }

  void Write(const std::string& name, absl::string_view content) {
    QUERN_ASSERT_OK(MakeDirectories(DirName(JoinPath(out_, name))));
    QUERN_ASSERT_OK(WriteFileDurably(JoinPath(out_, name), content));
  }

  // A finished output with one file.
  void WriteFinished() {
    Manifest manifest;
    manifest.files = {{"model.safetensors", 5, Sha256Of("hello")}};
    Write("model.safetensors", "hello");
    Write(kManifestName, ManifestToJson(manifest));
    Write(".quern/run.json", absl::StrCat(R"({"events": [{"identity": "no"}], "identity": ")", HexDigest(Sha256Of("job")), "\"}"));
  }

  std::optional<TempDir> dir_;
  std::string out_;
};

TEST_F(OutputClaimTest, SecondClaimNamesTheOwner) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputClaim claim, OutputClaim::Acquire(out_, "host 7 pid 3", "jobs/4"));
  EXPECT_THAT(OutputClaim::Acquire(out_, "other", "jobs/1"),
              StatusIs(absl::StatusCode::kFailedPrecondition, AllOf(HasSubstr("host 7 pid 3"), HasSubstr("jobs/4"), HasSubstr(out_))));
  claim.Release();
  QUERN_EXPECT_OK(OutputClaim::Acquire(out_, "other", "jobs/1"));
}

TEST_F(OutputClaimTest, ReleaseLeavesNothingThatWasNotThere) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputClaim claim, OutputClaim::Acquire(out_, "me", "jobs/1"));
  EXPECT_THAT(ListDirectory(JoinPath(out_, ".quern")), IsOkAndHolds(ElementsAre("lock", "owner.json")));
  claim.Release();
  EXPECT_FALSE(FileExists(out_));

  QUERN_ASSERT_OK(MakeDirectories(out_));
  { QUERN_ASSERT_OK_AND_ASSIGN(OutputClaim again, OutputClaim::Acquire(out_, "me", "jobs/1")); }
  EXPECT_THAT(ListDirectory(out_), IsOkAndHolds(IsEmpty()));
}

TEST_F(OutputClaimTest, ReleaseKeepsWhatOthersPutThere) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputClaim claim, OutputClaim::Acquire(out_, "me", "jobs/1"));
  Write(".quern/run.json", "{}");
  claim.Release();
  EXPECT_THAT(ListDirectory(JoinPath(out_, ".quern")), IsOkAndHolds(ElementsAre("run.json")));
}

TEST_F(OutputClaimTest, MovedClaimHoldsOn) {
  QUERN_ASSERT_OK_AND_ASSIGN(OutputClaim claim, OutputClaim::Acquire(out_, "me", "jobs/1"));
  OutputClaim moved = std::move(claim);
  EXPECT_THAT(OutputClaim::Acquire(out_, "other", "jobs/2"), StatusIs(absl::StatusCode::kFailedPrecondition));
  // Assigning over a claim releases it.
  QUERN_ASSERT_OK_AND_ASSIGN(moved, OutputClaim::Acquire(JoinPath(dir_->path(), "elsewhere"), "me", "jobs/3"));
  QUERN_EXPECT_OK(OutputClaim::Acquire(out_, "other", "jobs/2"));
}

TEST_F(OutputClaimTest, KilledOwnerLosesTheLockAndLeavesOutOurs) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const absl::StatusOr<OutputClaim> claim = OutputClaim::Acquire(out_, "dead", "jobs/1");
    _exit(claim.ok() ? 0 : 1);  // without destructors, as after a crash
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(FileExists(JoinPath(out_, ".quern/owner.json")));
  Write("model-00001-of-00002.safetensors", "x");
  QUERN_EXPECT_OK(CheckOutputUsable(out_, false));
  QUERN_EXPECT_OK(OutputClaim::Acquire(out_, "next", "jobs/2"));
}

TEST_F(OutputClaimTest, AbsentEmptyAndOnlyQuernAreUsable) {
  QUERN_EXPECT_OK(CheckOutputUsable(out_, false));
  QUERN_ASSERT_OK(MakeDirectories(out_));
  QUERN_EXPECT_OK(CheckOutputUsable(out_, false));
  Write(".quern/state/CURRENT", "");
  QUERN_EXPECT_OK(CheckOutputUsable(out_, false));
}

TEST_F(OutputClaimTest, ForeignFilesAreNamed) {
  for (const char* name : {"a", "b", "c", "d", "e"}) Write(name, "");
  for (const bool overwrite : {false, true}) {
    EXPECT_THAT(CheckOutputUsable(out_, overwrite), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("(a, b, c and 2 more)")));
  }
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(dir_->path(), "file"), ""));
  EXPECT_THAT(CheckOutputUsable(JoinPath(dir_->path(), "file"), true), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("is a file")));
}

TEST_F(OutputClaimTest, FinishedOutputNeedsOverwrite) {
  WriteFinished();
  EXPECT_THAT(CheckOutputUsable(out_, false), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("--overwrite")));
  QUERN_EXPECT_OK(CheckOutputUsable(out_, true));
}

TEST_F(OutputClaimTest, HalfPublishedOutputIsOursAndNotFinished) {
  WriteFinished();
  Write(".quern/run.json", "{\"state\": \"publishing\"}\n");
  QUERN_EXPECT_OK(CheckOutputUsable(out_, false));
  EXPECT_THAT(FinishedIdentity(out_), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(OutputClaimTest, OverwriteNeedsAReadableManifest) {
  WriteFinished();
  Write(kManifestName, "{");
  EXPECT_THAT(CheckOutputUsable(out_, true), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("remove the directory")));
}

TEST_F(OutputClaimTest, FinishedIdentityIsThatOfRunJson) {
  EXPECT_THAT(FinishedIdentity(out_), StatusIs(absl::StatusCode::kNotFound));
  WriteFinished();
  EXPECT_THAT(FinishedIdentity(out_), IsOkAndHolds(Sha256Of("job")));
}

TEST_F(OutputClaimTest, DamagedResultIsNotFinished) {
  WriteFinished();
  Write("model.safetensors", "hell");
  EXPECT_THAT(FinishedIdentity(out_), StatusIs(absl::StatusCode::kNotFound, HasSubstr("4 bytes")));
  EXPECT_THAT(CheckOutputUsable(out_, false),
              StatusIs(absl::StatusCode::kAlreadyExists, AllOf(HasSubstr("damaged"), HasSubstr("4 bytes"), HasSubstr("--overwrite"))));
  QUERN_EXPECT_OK(CheckOutputUsable(out_, true));
  QUERN_ASSERT_OK(RemoveFile(JoinPath(out_, "model.safetensors")));
  EXPECT_THAT(FinishedIdentity(out_), StatusIs(absl::StatusCode::kNotFound));
  for (const char* text : {"", "[]", "{\"identity\": 3}", "{\"identity\": \"zz\"}", "{\"identity\": \"abcd\"}", "{\"identity\""}) {
    Write(".quern/run.json", text);
    EXPECT_THAT(FinishedIdentity(out_), StatusIs(absl::StatusCode::kNotFound)) << text;
  }
}

}  // namespace
}  // namespace quern::daemon
