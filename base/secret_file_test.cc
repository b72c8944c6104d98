#include "base/secret_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "base/file.h"
#include "base/status_matchers.h"

namespace quern {
namespace {

using testing::HasSubstr;
using testing::Not;

const char kToken[] = "0123456789abcdef0123456789abcdef";

class SecretFileTest : public testing::Test {
 protected:
  std::string Write(const std::string& content, mode_t mode) {
    const std::string path = JoinPath(directory_.path(), "secret");
    EXPECT_THAT(WriteFileDurably(path, content), IsOk());
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  TempDir directory_ = *TempDir::Make("quern-secret-test");
};

TEST_F(SecretFileTest, OwnerAndGroupMayRead) {
  for (const mode_t mode : {0400, 0600, 0440, 0640}) EXPECT_THAT(ReadSecretFile(Write("x", mode)), IsOkAndHolds("x")) << mode;
}

TEST_F(SecretFileTest, OthersMayNot) {
  for (const mode_t mode : {0644, 0604, 0602, 0620, 0660, 0601, 0666}) {
    EXPECT_THAT(ReadSecretFile(Write("hidden", mode)).status(),
                StatusIs(absl::StatusCode::kFailedPrecondition, AllOf(HasSubstr("chmod 600"), Not(HasSubstr("hidden")))))
        << mode;
  }
}

TEST_F(SecretFileTest, DirectoriesAndMissingFilesAreTold) {
  EXPECT_THAT(ReadSecretFile(directory_.path()).status(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no regular file")));
  EXPECT_THAT(ReadSecretFile("/no/such/file").status(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such/file")));
}

TEST_F(SecretFileTest, TokensAreOneWordThatIsLongEnough) {
  EXPECT_THAT(ReadTokenFile(Write(std::string(kToken) + "\n", 0600)), IsOkAndHolds(kToken));
  for (const std::string& bad : {std::string(), std::string("short"), std::string(kToken) + " " + kToken, std::string(300, 'a'),
                                 std::string(kToken) + "\nEvil: yes", std::string(kToken) + "\x01"}) {
    EXPECT_THAT(ReadTokenFile(Write(bad, 0600)).status(), StatusIs(absl::StatusCode::kInvalidArgument, Not(HasSubstr("0123"))));
  }
}

TEST_F(SecretFileTest, AReplacedFileIsAnotherVersion) {
  const std::string path = Write("one", 0600);
  const FileVersion one = VersionOf(path);
  EXPECT_EQ(VersionOf(path), one);
  Write("two", 0600);  // the same size
  EXPECT_NE(VersionOf(path), one);
  ASSERT_EQ(unlink(path.c_str()), 0);
  EXPECT_EQ(VersionOf(path), FileVersion());
}

}  // namespace
}  // namespace quern
