#include "client/private_farm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <optional>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PrivateFarmTest : public testing::Test {
 protected:
  void SetUp() override {
    QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("farm"));
    directory_.emplace(std::move(directory));
    runtime_ = directory_->path() + "/runtime";
    QUERN_ASSERT_OK(MakeDirectories(runtime_));
    setenv("XDG_RUNTIME_DIR", runtime_.c_str(), 1);
  }

  std::string Script(const std::string& name, const std::string& body) {
    const std::string path = directory_->path() + "/" + name;
    QUERN_EXPECT_OK(WriteFileDurably(path, "#!/bin/sh\n" + body));
    EXPECT_EQ(chmod(path.c_str(), 0755), 0);
    return path;
  }

  std::optional<TempDir> directory_;
  std::string runtime_;
  Interrupt interrupt_;
};

TEST_F(PrivateFarmTest, CoordinatorThatDoesNotStartIsExplainedByItsLog) {
  PrivateFarm::Options options;
  options.coordinator_program = Script("quernd", "echo \"arguments: $*\"; echo the state is locked >&2; exit 4\n");
  options.state_directory = "/some/state";
  EXPECT_THAT(PrivateFarm::Start(options, interrupt_, Clock::Real()).status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("exit status 4"), HasSubstr("the state is locked"), HasSubstr("--private --listen unix:" + runtime_),
                             HasSubstr("--state-dir /some/state"), HasSubstr("--parent-fd="))));
  EXPECT_THAT(ListDirectory(runtime_), IsOkAndHolds(IsEmpty()));
}

TEST_F(PrivateFarmTest, WithoutAStateDirectoryNothingIsKept) {
  PrivateFarm::Options options;
  options.coordinator_program = Script("quernd", "echo \"arguments: $*\"; exit 4\n");
  EXPECT_THAT(PrivateFarm::Start(options, interrupt_, Clock::Real()).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("--in-memory")));
}

TEST_F(PrivateFarmTest, InterruptEndsAStartThatHangs) {
  PrivateFarm::Options options;
  options.coordinator_program = Script("quernd", "exec sleep 600\n");
  raise(SIGINT);
  EXPECT_THAT(PrivateFarm::Start(options, interrupt_, Clock::Real()).status(), StatusIs(absl::StatusCode::kCancelled));
  EXPECT_THAT(ListDirectory(runtime_), IsOkAndHolds(IsEmpty()));
}

TEST_F(PrivateFarmTest, ProgramsAreFoundOnThePath) {
  const std::string program = Script("quern-test-program", "exit 0\n");
  const std::string path = getenv("PATH");
  setenv("PATH", (directory_->path() + ":" + path).c_str(), 1);
  EXPECT_THAT(FindProgram("quern-test-program"), IsOkAndHolds(program));
  setenv("PATH", path.c_str(), 1);
  EXPECT_THAT(FindProgram("quern-test-program"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("quern-test-program")));
}

}  // namespace
}  // namespace quern::client
