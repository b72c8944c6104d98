#include "base/subprocess.h"

#include <signal.h>
#include <unistd.h>

#include "base/status_matchers.h"

namespace quern {
namespace {

TEST(SubprocessTest, ReportsExitStatusAndSignal) {
  Subprocess::Options options;
  options.tie_to_parent = false;
  options.argv = {"/bin/sh", "-c", "exit 3"};
  QUERN_ASSERT_OK_AND_ASSIGN(Subprocess child, Subprocess::Spawn(options));
  QUERN_ASSERT_OK_AND_ASSIGN(ExitState state, child.Wait());
  EXPECT_EQ(state.ToString(), "exit status 3");
  EXPECT_FALSE(child.running());

  options.argv = {"/bin/sh", "-c", "kill -9 $$"};
  QUERN_ASSERT_OK_AND_ASSIGN(Subprocess killed, Subprocess::Spawn(options));
  QUERN_ASSERT_OK_AND_ASSIGN(state, killed.Wait());
  EXPECT_TRUE(state.signaled);
  EXPECT_EQ(state.code, SIGKILL);
}

TEST(SubprocessTest, ChildSeesTheParentsPipeClose) {
  Subprocess::Options options;
  // "$0" is --parent-fd=N: the shell waits for the end of file on it.
  options.argv = {"/bin/sh", "-c", "fd=${0#--parent-fd=}; eval \"cat <&$fd\"; exit 7"};
  QUERN_ASSERT_OK_AND_ASSIGN(Subprocess child, Subprocess::Spawn(options));
  ExitState state;
  EXPECT_THAT(child.Poll(&state), IsOkAndHolds(false));
  child.CloseParentPipe();
  QUERN_ASSERT_OK_AND_ASSIGN(state, child.Wait());
  EXPECT_EQ(state.code, 7);
}

TEST(SubprocessTest, MissingProgramIsNotFound) {
  Subprocess::Options options;
  options.argv = {"/no/such/program"};
  EXPECT_THAT(Subprocess::Spawn(options), StatusIs(absl::StatusCode::kNotFound, testing::HasSubstr("/no/such/program")));
}

TEST(SubprocessTest, OutputGoesToTheLog) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir dir, TempDir::Make("subprocess_test"));
  Subprocess::Options options;
  options.tie_to_parent = false;
  options.log_path = JoinPath(dir.path(), "log");
  options.argv = {"/bin/sh", "-c", "echo out; echo err >&2"};
  QUERN_ASSERT_OK_AND_ASSIGN(Subprocess child, Subprocess::Spawn(options));
  QUERN_ASSERT_OK(child.Wait());
  EXPECT_THAT(ReadFileToString(options.log_path), IsOkAndHolds("out\nerr\n"));
}

}  // namespace
}  // namespace quern
