#include "daemon/rpc/method_roles.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

// Of all files of the protocol, as they lie in the tree: a service that nobody thought of is found too.
std::set<std::string> MethodsOfTheProtocol() {
  std::set<std::string> methods;
  const std::string directory = "proto/quern/v1";
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(directory);
  EXPECT_THAT(names, IsOk());
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    if (!absl::EndsWith(name, ".proto")) continue;
    const absl::StatusOr<std::string> text = ReadFileToString(JoinPath(directory, name));
    EXPECT_THAT(text, IsOk());
    if (!text.ok() || !absl::StrContains(*text, "\nservice ")) continue;
    const auto* file = google::protobuf::DescriptorPool::generated_pool()->FindFileByName(absl::StrCat("quern/v1/", name));
    EXPECT_NE(file, nullptr) << name << " is not linked into this test";
    if (file == nullptr) continue;
    EXPECT_GT(file->service_count(), 0) << name;
    for (int i = 0; i < file->service_count(); ++i) {
      const google::protobuf::ServiceDescriptor* service = file->service(i);
      for (int j = 0; j < service->method_count(); ++j) {
        methods.insert(absl::StrCat("/", service->full_name(), "/", service->method(j)->name()));
      }
    }
  }
  return methods;
}

TEST(MethodRolesTest, EveryMethodOfTheProtocolHasARule) {
  const std::set<std::string> methods = MethodsOfTheProtocol();
  ASSERT_GE(methods.size(), 17u);
  for (const std::string& method : methods) EXPECT_NE(FindMethodRule(method), nullptr) << method << " has no role";
  std::set<std::string> ruled;
  for (const MethodRule& rule : AllMethodRules()) {
    EXPECT_TRUE(ruled.insert(std::string(rule.method)).second) << rule.method << " has two rules";
    if (absl::StartsWith(rule.method, "/quern.")) {
      EXPECT_TRUE(methods.count(std::string(rule.method)) > 0) << rule.method << " does not exist";
      EXPECT_NE(rule.roles, 0) << rule.method << " is open to everybody";
    }
  }
}

TEST(MethodRolesTest, RolesAreNoLadderForWorkers) {
  const MethodRule* synchronize = FindMethodRule("/quern.v1.Workers/Synchronize");
  const MethodRule* create = FindMethodRule("/quern.v1.Jobs/CreateJob");
  const MethodRule* list = FindMethodRule("/quern.v1.Jobs/ListJobs");
  const MethodRule* cordon = FindMethodRule("/quern.v1.Jobs/CordonWorker");
  for (const MethodRule* rule : {synchronize, create, list, cordon}) {
    ASSERT_NE(rule, nullptr);
    EXPECT_TRUE(Admits(*rule, RolesOf(Role::kAdmin))) << rule->method;
    EXPECT_FALSE(Admits(*rule, 0)) << rule->method;
  }
  EXPECT_TRUE(Admits(*synchronize, RolesOf(Role::kWorker)));
  EXPECT_FALSE(Admits(*synchronize, Role::kRead | Role::kSubmit));
  EXPECT_TRUE(Admits(*create, RolesOf(Role::kSubmit)));
  EXPECT_FALSE(Admits(*create, Role::kRead | Role::kWorker));
  EXPECT_TRUE(Admits(*list, RolesOf(Role::kRead)));
  EXPECT_TRUE(Admits(*list, RolesOf(Role::kSubmit)));
  EXPECT_FALSE(Admits(*list, RolesOf(Role::kWorker)));
  EXPECT_FALSE(Admits(*cordon, Role::kRead | Role::kSubmit | Role::kWorker));
}

TEST(MethodRolesTest, NamesOfRolesAreReadBack) {
  for (const Role role : {Role::kRead, Role::kSubmit, Role::kWorker, Role::kAdmin}) {
    EXPECT_EQ(ParseRole(RoleNames(RolesOf(role))), role);
  }
  EXPECT_EQ(ParseRole("root"), std::nullopt);
  EXPECT_EQ(ParseRole(""), std::nullopt);
  EXPECT_EQ(RoleNames(Role::kWorker | Role::kRead), "read,worker");
}

}  // namespace
}  // namespace quern::daemon
