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

constexpr const char* kCommands[] = {"quantize", "dequantize", "plan",    "inspect", "verify",   "synth", "submit",
                                     "jobs",     "show",       "tasks",   "watch",   "cancel",   "pause", "resume",
                                     "retry",    "delete",     "workers", "cordon",  "uncordon", "drain"};

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

TEST(AppTest, UnknownCommandIsNamedAndTheNearestSuggested) {
  const Result result = RunWith({"quantise", "org/name"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("no command \"quantise\""), HasSubstr("did you mean \"quantize\"?")));
  EXPECT_THAT(RunWith({"bogus"}).err, AllOf(HasSubstr("no command \"bogus\""), HasSubstr("did you mean \"jobs\"?")));
  EXPECT_THAT(RunWith({"xy"}).err, AllOf(HasSubstr("no command \"xy\""), HasSubstr("--help")));
}

TEST(AppTest, UsageErrorsAreToldInJsonToo) {
  const std::vector<std::string> wrong[] = {{"bogus", "--json"},
                                            {"plan", "--json"},
                                            {"plan", "org/name", "--scheme", "W4A16", "--shards", "3", "--json"},
                                            {"plan", "org/name", "--json"},
                                            {"inspect", "dir\xFF", "--json"},
                                            {"inspect", "", "--json"},
                                            {"pause", "x", "--json"}};
  for (const auto& arguments : wrong) {
    const Result result = RunWith(arguments);
    EXPECT_EQ(result.code, 2) << arguments[0];
    const auto json = nlohmann::json::parse(result.out);
    EXPECT_EQ(json["error"]["code"], "INVALID_ARGUMENT") << arguments[0];
    EXPECT_NE(json["error"]["message"], "");
    EXPECT_NE(result.err, "");
  }
  EXPECT_EQ(RunWith({"plan"}).out, "");
}

TEST(AppTest, EmptyPathsAreWrongUsage) {
  EXPECT_EQ(RunWith({"quantize", "org/name", "-o", "", "--scheme", "W4A16"}).code, 2);
  EXPECT_EQ(RunWith({"submit", "org/name", "-o", "", "--scheme", "W4A16"}).code, 2);
  EXPECT_EQ(RunWith({"synth", "", "--family", "llama", "--layers", "1"}).code, 2);
  EXPECT_EQ(RunWith({"verify", ""}).code, 2);
  EXPECT_EQ(RunWith({"plan", "", "--scheme", "W4A16"}).code, 2);
}

TEST(AppTest, NamesOfJobsAreChecked) {
  for (const char* command : {"show", "tasks", "watch", "cancel", "pause", "resume", "retry", "delete"}) {
    for (const char* name : {"x", "", "jobs/", "jobs/x", "jobs/7/tasks/0", "-7", "7.5", "99999999999999999999999"}) {
      const Result result = RunWith({command, "--", name});
      EXPECT_EQ(result.code, 2) << command << " " << name;
    }
    EXPECT_THAT(RunWith({command, "x"}).err, HasSubstr("jobs/7"));
  }
}

TEST(AppTest, OutputAndSourceMustLieApart) {
  QUERN_ASSERT_OK_AND_ASSIGN(TempDir directory, TempDir::Make("app"));
  const std::string source = directory.path() + "/src";
  QUERN_ASSERT_OK(MakeDirectories(source + "/inner"));
  for (const auto& [from, to] : {std::pair(source, source + "/out"), std::pair(source + "/inner", source), std::pair(source, source)}) {
    const Result result = RunWith({"quantize", from, "-o", to, "--scheme", "W4A16"});
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.err, HasSubstr("choose another output"));
  }
  EXPECT_FALSE(FileExists(source + "/out"));
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
