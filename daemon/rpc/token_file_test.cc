#include "daemon/rpc/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

const std::string kOne(32, '1');
const std::string kTwo = "abcdefghijklmnopqrstuvwxyz-._~+/=ABC";

TEST(TokenFileTest, LinesAreNameRolesAndToken) {
  const std::string text =
      absl::StrCat("# tokens of the farm\n\nci  submit,read\t", kOne, "\nnode7 worker sha256:", HexDigest(Sha256Of(kTwo)), "\r\n");
  QUERN_ASSERT_OK_AND_ASSIGN(const TokenTable table, TokenTable::Parse(text, "f"));
  EXPECT_THAT(table.tokens(), SizeIs(2));
  ASSERT_NE(table.Find(kOne), nullptr);
  EXPECT_EQ(table.Find(kOne)->name, "ci");
  EXPECT_EQ(table.Find(kOne)->roles, Role::kSubmit | Role::kRead);
  ASSERT_NE(table.Find(kTwo), nullptr);
  EXPECT_EQ(table.Find(kTwo)->name, "node7");
  EXPECT_EQ(table.Find(""), nullptr);
  EXPECT_EQ(table.Find(kOne.substr(1)), nullptr);
  EXPECT_EQ(table.Find(absl::StrCat(kOne, "1")), nullptr);
  // Who has read the file has no token yet.
  EXPECT_EQ(table.Find(absl::StrCat("sha256:", HexDigest(Sha256Of(kTwo)))), nullptr);
  EXPECT_EQ(table.Find(HexDigest(Sha256Of(kTwo))), nullptr);
}

TEST(TokenFileTest, ErrorsNameTheLineAndNotTheToken) {
  const std::string secret = "SECRETSECRETSECRETSECRETSECRETSECRET";
  for (const std::string& line :
       {absl::StrCat("ci ", secret), absl::StrCat("ci root ", secret), absl::StrCat("c i submit ", secret),
        absl::StrCat("ci submit ", secret, "!"), std::string("ci submit SECRET"), absl::StrCat("ci submit, ", secret),
        absl::StrCat("ci submit sha256:", secret), absl::StrCat(secret, " submit ci"), absl::StrCat("ci submit ", secret, " ", secret)}) {
    EXPECT_THAT(TokenTable::Parse(absl::StrCat("a read ", kOne, "\n", line, "\n"), "/etc/tokens").status(),
                StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("/etc/tokens, line 2"), Not(HasSubstr("SECRET")))))
        << line;
  }
}

TEST(TokenFileTest, AnEmptyFileAndDoublesAreRefused) {
  EXPECT_THAT(TokenTable::Parse("# none\n", "f").status(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("holds no token")));
  EXPECT_THAT(TokenTable::Parse(absl::StrCat("a read ", kOne, "\na read ", kTwo, "\n"), "f").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("line 2")));
  EXPECT_THAT(TokenTable::Parse(absl::StrCat("a read ", kOne, "\nb admin ", kOne, "\n"), "f").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("line 2")));
}

TEST(TokenFileTest, AFileThatOthersMayReadIsRefused) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir directory, TempDir::Make("quern-token-test"));
  const std::string path = JoinPath(directory.path(), "tokens");
  QUERN_ASSERT_OK(WriteFileDurably(path, absl::StrCat("a read ", kOne, "\n")));
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_THAT(TokenTable::Read(path).status(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("chmod 600")));
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  EXPECT_THAT(TokenTable::Read(path), IsOk());
}

}  // namespace
}  // namespace quern::daemon
