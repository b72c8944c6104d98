#include "client/download.h"

#include <signal.h>
#include <sys/resource.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::client {
namespace {

using quern::v1::ListResultResponse;
using testing::ElementsAre;
using testing::HasSubstr;

// Files in memory, over a link that breaks every so many bytes.
class FakeSource : public ResultSource {
 public:
  void Add(const std::string& name, const std::string& content) {
    files[name] = content;
    ListResultResponse::File& file = *list.add_files();
    file.set_name(name);
    file.set_size(content.size());
    file.set_sha256(Sha256Of(content));
  }

  absl::StatusOr<ListResultResponse> List() override { return list; }
  absl::Status Read(const std::string& name, uint64_t offset, const std::function<absl::Status(ResultChunk&)>& take) override {
    reads.push_back(absl::StrCat(name, " ", offset));
    const std::string& content = files.at(name);
    uint64_t sent = 0;
    while (offset < content.size()) {
      if (sent >= break_after) return absl::UnavailableError("the link broke");
      ResultChunk chunk{.offset = offset, .xxh3 = 0, .data = content.substr(offset, 1000)};
      chunk.xxh3 = Xxh3Of(chunk.data.data(), chunk.data.size());
      if (garble > 0) {
        --garble;
        chunk.data[0] ^= 1;
      }
      const uint64_t size = chunk.data.size();
      const absl::Status taken = take(chunk);
      if (!taken.ok()) return taken;
      offset += size;
      sent += size;
      bytes += size;
    }
    return absl::OkStatus();
  }

  std::map<std::string, std::string> files;
  ListResultResponse list;
  uint64_t break_after = UINT64_MAX;
  int garble = 0;
  std::vector<std::string> reads;
  uint64_t bytes = 0;
};

class DownloadTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string weights;
    for (int i = 0; i < 10'000; ++i) weights.push_back(static_cast<char>(i * 31 >> 3));
    source_.Add("model.safetensors", weights);
    source_.Add("more/tokenizer.json", "{}");
    source_.Add("empty", "");
    source_.Add("config.json", "{ }");
    options_.clock = &clock_;
    options_.wait = [this](absl::Duration time) {
      clock_.Advance(time);
      return !interrupted_;
    };
  }
  absl::Status Fetch() { return Download(source_, out_, options_).status(); }
  std::string Content(const std::string& name) { return ReadFileToString(JoinPath(out_, name)).value_or("(none)"); }
  void ExpectAll() {
    for (const auto& [name, content] : source_.files) EXPECT_EQ(Content(name), content) << name;
    EXPECT_THAT(ListDirectory(out_), IsOkAndHolds(ElementsAre("config.json", "empty", "model.safetensors", "more")));
  }

  const TempDir dir_ = TempDir::Make("download").value();
  const std::string out_ = JoinPath(dir_.path(), "out");
  ManualClock clock_;
  FakeSource source_;
  DownloadOptions options_;
  bool interrupted_ = false;
};

TEST_F(DownloadTest, FilesComeInTheOrderOfTheList) {
  uint64_t last = 0;
  options_.progress = [&](const std::string&, uint64_t have, uint64_t total) {
    EXPECT_GE(have, last);
    last = have;
    EXPECT_EQ(total, 10'005);
  };
  QUERN_ASSERT_OK(Fetch());
  ExpectAll();
  EXPECT_EQ(last, 10'005);
  EXPECT_THAT(source_.reads, ElementsAre("model.safetensors 0", "more/tokenizer.json 0", "config.json 0"));
}

TEST_F(DownloadTest, BrokenLinkGoesOnWhereItWas) {
  source_.break_after = 3000;
  QUERN_ASSERT_OK(Fetch());
  ExpectAll();
  EXPECT_EQ(source_.bytes, 10'005);
  EXPECT_THAT(source_.reads, ElementsAre("model.safetensors 0", "model.safetensors 3000", "model.safetensors 6000",
                                         "model.safetensors 9000", "more/tokenizer.json 0", "config.json 0"));
}

TEST_F(DownloadTest, InterruptedDownloadGoesOn) {
  source_.break_after = 3000;
  interrupted_ = true;
  EXPECT_THAT(Fetch(), StatusIs(absl::StatusCode::kCancelled, HasSubstr("run the same command again")));
  EXPECT_EQ(Content("model.safetensors.part").size(), 3000);
  EXPECT_FALSE(FileExists(JoinPath(out_, "model.safetensors")));
  interrupted_ = false;
  source_.break_after = UINT64_MAX;
  QUERN_ASSERT_OK(Fetch());
  ExpectAll();
  EXPECT_EQ(source_.bytes, 10'005);
  // Nothing is fetched twice.
  QUERN_ASSERT_OK(Fetch());
  EXPECT_EQ(source_.bytes, 10'005);
}

TEST_F(DownloadTest, LinkThatStaysBrokenEndsIt) {
  source_.break_after = 0;
  EXPECT_THAT(Fetch(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("nothing has come for 5m")));
}

TEST_F(DownloadTest, WriteThatFailsEndsIt) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit less = before;
  less.rlim_cur = 3000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
  const absl::Status status = Fetch();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors.part"));
  EXPECT_EQ(source_.reads.size(), 1);
  EXPECT_EQ(Content("model.safetensors.part").size(), 3000);
  QUERN_ASSERT_OK(Fetch());
  ExpectAll();
  EXPECT_EQ(source_.reads[1], "model.safetensors 3000");
}

TEST_F(DownloadTest, GarbledBytesComeAgain) {
  source_.garble = 2;
  QUERN_ASSERT_OK(Fetch());
  ExpectAll();
}

TEST_F(DownloadTest, PartOfAnotherResultIsStartedOver) {
  QUERN_ASSERT_OK(MakeDirectories(out_));
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(out_, "model.safetensors.part"), std::string(500, 'x')));
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(out_, "config.json.part"), std::string(500, 'x')));
  QUERN_ASSERT_OK(Fetch());
  ExpectAll();
}

TEST_F(DownloadTest, FilesOfOthersAreNotReplaced) {
  QUERN_ASSERT_OK(MakeDirectories(out_));
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(out_, "config.json"), "{?}"));
  QUERN_ASSERT_OK(WriteFileDurably(JoinPath(out_, "note"), "mine"));
  EXPECT_THAT(Fetch(), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("(config.json)")));
  EXPECT_THAT(ListDirectory(out_), IsOkAndHolds(ElementsAre("config.json", "note")));
  EXPECT_EQ(Content("config.json"), "{?}");
  EXPECT_EQ(source_.bytes, 0);
}

TEST_F(DownloadTest, ContentWithAnotherDigestIsRefused) {
  source_.files["config.json"] = "{?}";
  EXPECT_THAT(Fetch(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("config.json")));
  EXPECT_FALSE(FileExists(JoinPath(out_, "config.json")));
  EXPECT_FALSE(FileExists(JoinPath(out_, "config.json.part")));
}

TEST_F(DownloadTest, NamesThatLeadElsewhereAreRefused) {
  for (const char* name : {"../x", "/x", "a//b", "a/./b", "", ".", "x.part"}) {
    FakeSource bad;
    bad.Add(name, "content");
    EXPECT_THAT(Download(bad, out_, options_), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("plain name"))) << name;
  }
  EXPECT_FALSE(FileExists(out_));
}

}  // namespace
}  // namespace quern::client
