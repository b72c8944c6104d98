#include "client/app.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/empty_option.h"
#include "base/text_check.h"
#include "base/utf8.h"
#include "client/commands/command.h"
#include "client/exit_code.h"
#include "client/json_output.h"

namespace quern::client {
namespace {

// In the order of the list that --help prints.
std::vector<std::unique_ptr<Command>> MakeCommands() {
  std::vector<std::unique_ptr<Command>> commands;
  for (const auto make :
       {NewQuantizeCommand, NewDequantizeCommand, NewPlanCommand,   NewInspectCommand, NewVerifyCommand, NewSynthCommand,
        NewSubmitCommand,   NewJobsCommand,       NewShowCommand,   NewTasksCommand,   NewWatchCommand,  NewDownloadCommand,
        NewCancelCommand,   NewPauseCommand,      NewResumeCommand, NewRetryCommand,   NewDeleteCommand, NewWorkersCommand,
        NewCordonCommand,   NewUncordonCommand,   NewDrainCommand}) {
    commands.push_back(make());
  }
  return commands;
}

// Arguments become fields of messages, which hold UTF-8 only.
absl::Status CheckArguments(const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (IsValidUtf8(arguments[i])) continue;
    const bool after_option = i > 0 && absl::StartsWith(arguments[i - 1], "-");
    return UsageError(absl::StrCat("argument ", i + 1, after_option ? absl::StrCat(" (after ", arguments[i - 1], ")") : "", ", \"",
                                   EscapeUnlessUtf8(arguments[i]), "\", is no UTF-8"));
  }
  return absl::OkStatus();
}

// How many characters must be changed, added or left out to make `b` of `a`.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// The first argument names a command, or is an option of the program.
absl::Status CheckCommand(const std::vector<std::string>& arguments, const std::vector<std::unique_ptr<Command>>& commands) {
  if (arguments.empty() || absl::StartsWith(arguments[0], "-")) return absl::OkStatus();
  std::string nearest;
  size_t distance = arguments[0].size();  // what has no character in common is no suggestion
  for (const std::unique_ptr<Command>& command : commands) {
    if (command->Name() == arguments[0]) return absl::OkStatus();
    const size_t changes = EditDistance(arguments[0], command->Name());
    if (changes >= distance) continue;
    distance = changes;
    nearest = command->Name();
  }
  return UsageError(absl::StrCat("there is no command \"", arguments[0], "\"; ",
                                 nearest.empty() ? "" : absl::StrCat("did you mean \"", nearest, "\"? "),
                                 "quern --help lists the commands"));
}

// For errors that are found before the command runs.
bool AsksForJson(const std::vector<std::string>& arguments) {
  return std::find(arguments.begin(), arguments.end(), "--json") != arguments.end();
}

int WrongUsage(const absl::Status& status, bool json, Console& console) {
  if (json) console.out << ErrorJson(status) << std::flush;
  console.err << "quern: " << std::string(status.message()) << "\n";
  return static_cast<int>(ExitCodeOf(status));
}

ExitCode RunCommand(Command& command, Console& console) {
  const absl::StatusOr<ExitCode> code = command.Run(console);
  console.out.flush();
  if (code.ok()) {
    if (console.out.good()) return *code;
    console.err << "quern: the output could not be written\n";
    return ExitCode::kFailed;
  }
  if (command.json()) console.out << ErrorJson(code.status()) << std::flush;
  console.err << "quern " << command.Name() << ": " << PlainLines(code.status().message()) << "\n";
  return ExitCodeOf(code.status());
}

}  // namespace

int RunApp(std::vector<std::string> arguments, Console& console) {
  const bool json = AsksForJson(arguments);
  if (const absl::Status status = CheckArguments(arguments); !status.ok()) return WrongUsage(status, json, console);
  CLI::App app("Quantizes checkpoints that do not fit in memory.", "quern");
  app.set_version_flag("--version", absl::StrCat("quern ", QUERN_VERSION));
  app.require_subcommand(1);
  app.footer(
      "Exit status: 0 done, 1 failed or stopped, 2 wrong usage, 3 verification found a mismatch.\n"
      "quern COMMAND --help shows the options of a command and an example.");
  const std::vector<std::unique_ptr<Command>> commands = MakeCommands();
  if (const absl::Status status = CheckCommand(arguments, commands); !status.ok()) return WrongUsage(status, json, console);
  std::vector<std::pair<CLI::App*, Command*>> parsers;
  for (const std::unique_ptr<Command>& command : commands) {
    CLI::App* parser = app.add_subcommand(command->Name(), command->Summary());
    command->AddOptions(*parser);
    parser->add_flag("--json", *command->mutable_json(), "Print the result as JSON");
    parser->footer(absl::StrCat("Example:\n  ", command->Example()));
    parsers.emplace_back(parser, command.get());
  }
  try {
    std::reverse(arguments.begin(), arguments.end());
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    const bool asked = error.get_exit_code() == 0;  // for help or the version
    if (!asked && json) console.out << ErrorJson(UsageError(error.what())) << std::flush;
    app.exit(error, console.out, console.err);
    return static_cast<int>(asked ? ExitCode::kDone : ExitCode::kUsage);
  }
  for (const auto& [parser, command] : parsers) {
    if (!parser->parsed()) continue;
    if (const absl::Status status = CheckNoEmptyOption(*parser); !status.ok()) {
      return WrongUsage(UsageError(absl::StrCat(command->Name(), ": ", status.message())), json, console);
    }
    return static_cast<int>(RunCommand(*command, console));
  }
  return static_cast<int>(ExitCode::kUsage);
}

}  // namespace quern::client
