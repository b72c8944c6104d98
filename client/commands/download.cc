#include "client/download.h"

#include <CLI/CLI.hpp>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/status_macros.h"
#include "client/commands/server_command.h"
#include "client/human.h"
#include "client/json_output.h"
#include "client/paths.h"
#include "client/progress.h"

namespace quern::client {
namespace {

constexpr absl::Duration kLiveInterval = absl::Milliseconds(200);
constexpr absl::Duration kPlainInterval = absl::Seconds(5);

class DownloadCommand : public JobCommand {
 public:
  std::string Name() const override { return "download"; }
  std::string Summary() const override { return "Fetch the result of a finished job to this machine; run again to continue"; }
  std::string Example() const override { return "quern download jobs/7 -o /models/Laguna-S-W4 --server coordinator:7450"; }

  void AddOptions(CLI::App& app) override {
    JobCommand::AddOptions(app);
    app.add_option("-o,--output", output_, "Directory for the files; what is there already is compared and kept, nothing is replaced")
        ->required()
        ->type_name("DIR");
  }

  absl::StatusOr<ExitCode> Run(Console& console) override {
    Interrupt interrupt;
    QUERN_ASSIGN_OR_RETURN(const std::string name, JobName(job()));
    QUERN_ASSIGN_OR_RETURN(const std::string directory, AbsolutePath(output_));
    QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, ConnectChannel());
    const std::unique_ptr<ResultSource> source = NewResultSource(channel, server(), security().tls, name, &interrupt);

    DownloadOptions options;
    options.clock = console.clock;
    options.wait = [&](absl::Duration time) {
      const absl::Duration until = console.clock->Monotonic() + time;
      while (!interrupt.requested() && console.clock->Monotonic() < until) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return !interrupt.requested();
    };
    RateMeter rate(absl::Seconds(10));
    const absl::Duration interval = console.err_is_terminal ? kLiveInterval : kPlainInterval;
    absl::Duration drawn = console.clock->Monotonic();
    bool live = false;
    options.progress = [&](const std::string& file, uint64_t have, uint64_t total) {
      const absl::Duration now = console.clock->Monotonic();
      rate.Add(now, have);
      if (now - drawn < interval) return;
      drawn = now;
      live = console.err_is_terminal;
      console.err << (live ? "\r\x1b[K" : "")
                  << absl::StrCat(FormatByteSize(have), " of ", FormatByteSize(total), "  ", FormatRate(rate.growth(), rate.elapsed()),
                                  "  ETA ", FormatElapsed(rate.Eta(total - have)), "  ", file)
                  << (live ? "" : "\n") << std::flush;
    };
    const absl::StatusOr<quern::v1::ListResultResponse> list = Download(*source, directory, options);
    if (live) console.err << "\r\x1b[K" << std::flush;
    QUERN_RETURN_IF_ERROR(list.status());
    uint64_t bytes = 0;
    for (const auto& file : list->files()) bytes += file.size();
    console.out << (json() ? ToJson(*list)
                           : absl::StrCat(name, " is in ", directory, ": ", list->files_size(), " files, ", FormatByteSize(bytes), "\n"));
    return ExitCode::kDone;
  }

 private:
  std::string output_;
};

}  // namespace

std::unique_ptr<Command> NewDownloadCommand() { return std::make_unique<DownloadCommand>(); }

}  // namespace quern::client
