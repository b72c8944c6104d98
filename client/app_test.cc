#include "client/app.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Result {
  int code;
  std::string out, err;
};

Result RunWith(std::vector<std::string> arguments) {
  std::ostringstream out, err;
  Console console{.out = out, .err = err};
  const int code = RunApp(std::move(arguments), console);
  return {code, out.str(), err.str()};
}

constexpr const char* kCommands[] = {"quantize", "dequantize", "plan",   "inspect", "verify", "synth", "submit", "jobs",   "show",
                                     "tasks",    "watch",      "cancel", "pause",   "resume", "retry", "delete", "workers"};

TEST(AppTest, HelpListsEveryCommand) {
  const Result result = RunWith({"--help"});
  EXPECT_EQ(result.code, 0);
  for (const char* command : kCommands) EXPECT_THAT(result.out, HasSubstr(command));
}

TEST(AppTest, EveryCommandHasHelpWithAnExampleAndJson) {
  for (const char* command : kCommands) {
    const Result result = RunWith({command, "--help"});
    EXPECT_EQ(result.code, 0) << command;
    EXPECT_THAT(result.out, AllOf(HasSubstr("Example:\n  quern " + std::string(command)), HasSubstr("--json")));
  }
}

TEST(AppTest, VersionIsPrinted) {
  const Result result = RunWith({"--version"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("quern " QUERN_VERSION));
}

TEST(AppTest, ArgumentsThatAreNoUtf8AreWrongUsage) {
  const Result option = RunWith({"plan", "org/name", "--scheme", "W4A16", "--targets", "mlp\xFF"});
  EXPECT_EQ(option.code, 2);
  EXPECT_THAT(option.err, AllOf(HasSubstr("--targets"), HasSubstr("mlp\\xff")));
  const Result positional = RunWith({"inspect", "dir\xFF"});
  EXPECT_EQ(positional.code, 2);
  EXPECT_THAT(positional.err, AllOf(HasSubstr("argument 2"), HasSubstr("dir\\xff")));
}

TEST(AppTest, SizesOfZeroAreWrongUsage) {
  for (const char* option : {"--layers", "--experts", "--hidden", "--intermediate", "--vocab"}) {
    const Result result = RunWith({"synth", "out", "--family", "llama", "--layers", "1", option, "0"});
    EXPECT_EQ(result.code, 2) << option;
    EXPECT_THAT(result.err, HasSubstr(option));
  }
}

TEST(AppTest, WrongUsageIsTwo) {
  EXPECT_EQ(RunWith({}).code, 2);
  EXPECT_EQ(RunWith({"conquer"}).code, 2);
  EXPECT_EQ(RunWith({"quantize"}).code, 2);
  EXPECT_EQ(RunWith({"quantize", "org/name", "-o", "out", "--scheme", "W4A16", "--shards", "3"}).code, 2);
  EXPECT_EQ(RunWith({"quantize", "org/name", "-o", "out"}).code, 2);
  for (const char* nothing : {"", ",", " , "}) {
    const Result result = RunWith({"plan", "org/name", "--scheme", "W4A16", "--targets", nothing});
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, HasSubstr("--targets: no pattern in"));
  }
  EXPECT_EQ(RunWith({"quantize", "org/name", "-o", "out", "--scheme", "W4A16", "--memory", "lots"}).code, 2);
  EXPECT_EQ(RunWith({"synth", "out", "--family", "laguna"}).code, 2);
  EXPECT_EQ(RunWith({"show"}).code, 2);
}

TEST(AppTest, UsageErrorsOfTheProgramNameTheOption) {
  EXPECT_THAT(RunWith({"plan", "org/name", "--scheme", "W4A16", "--memory", "lots"}).err,
              AllOf(HasSubstr("quern plan"), HasSubstr("--memory")));
}

TEST(AppTest, MissingSourceIsAFailureThatJsonTellsToo) {
  const Result result = RunWith({"inspect", "/no/such/directory", "--json"});
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(nlohmann::json::parse(result.out)["error"]["code"], "NOT_FOUND");
  EXPECT_THAT(result.err, HasSubstr("/no/such/directory"));
}

TEST(AppTest, NobodyAtTheAddressIsAFailureThatSaysWhatToDo) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("app"));
  const std::string address = "unix:" + directory.path() + "/none.sock";
  const Result result = RunWith({"jobs", "--server", address});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr(address), HasSubstr("quernd")));
}

}  // namespace
}  // namespace quern::client
