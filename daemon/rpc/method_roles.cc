#include "daemon/rpc/method_roles.h"

#include <utility>

#include "absl/strings/str_join.h"

namespace quern::daemon {
namespace {

constexpr std::pair<Role, absl::string_view> kNames[] = {
    {Role::kRead, "read"}, {Role::kSubmit, "submit"}, {Role::kWorker, "worker"}, {Role::kAdmin, "admin"}};

constexpr RoleSet kEverybody = 0;
constexpr RoleSet kAnyRole = Role::kRead | Role::kSubmit | Role::kWorker;
constexpr RoleSet kReaders = Role::kRead | Role::kSubmit;
constexpr RoleSet kSubmitters = RolesOf(Role::kSubmit);
constexpr RoleSet kWorkers = RolesOf(Role::kWorker);
constexpr RoleSet kAdmins = RolesOf(Role::kAdmin);

}  // namespace

const std::vector<MethodRule>& AllMethodRules() {
  static const auto* const rules = new std::vector<MethodRule>{
      {"/quern.v1.Jobs/CreateJob", kSubmitters, true},
      {"/quern.v1.Jobs/GetJob", kReaders},
      {"/quern.v1.Jobs/ListJobs", kReaders},
      {"/quern.v1.Jobs/WatchJob", kReaders},
      {"/quern.v1.Jobs/CancelJob", kSubmitters, true},
      {"/quern.v1.Jobs/PauseJob", kSubmitters, true},
      {"/quern.v1.Jobs/ResumeJob", kSubmitters, true},
      {"/quern.v1.Jobs/RetryJob", kSubmitters, true},
      {"/quern.v1.Jobs/DeleteJob", kSubmitters, true},
      {"/quern.v1.Jobs/ListTasks", kReaders},
      {"/quern.v1.Jobs/ListWorkers", kReaders},
      {"/quern.v1.Jobs/CordonWorker", kAdmins, true},
      {"/quern.v1.Jobs/UncordonWorker", kAdmins, true},
      {"/quern.v1.Jobs/DrainWorker", kAdmins, true},
      // These open files of the caller's choice.
      {"/quern.v1.Jobs/PlanJob", kSubmitters},
      {"/quern.v1.Jobs/InspectCheckpoint", kSubmitters},
      {"/quern.v1.Workers/Synchronize", kWorkers},
      // For probes, which have no tokens. They say whether the server runs and nothing else.
      {"/grpc.health.v1.Health/Check", kEverybody},
      {"/grpc.health.v1.Health/Watch", kEverybody},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", kAnyRole},
  };
  return *rules;
}

const MethodRule* FindMethodRule(absl::string_view method) {
  for (const MethodRule& rule : AllMethodRules()) {
    if (rule.method == method) return &rule;
  }
  return nullptr;
}

bool Admits(const MethodRule& rule, RoleSet roles) {
  return rule.roles == kEverybody || (rule.roles & roles) != 0 || (roles & RolesOf(Role::kAdmin)) != 0;
}

std::optional<Role> ParseRole(absl::string_view text) {
  for (const auto& [role, name] : kNames) {
    if (name == text) return role;
  }
  return std::nullopt;
}

std::string RoleNames(RoleSet roles) {
  std::vector<absl::string_view> names;
  for (const auto& [role, name] : kNames) {
    if ((roles & RolesOf(role)) != 0) names.push_back(name);
  }
  return absl::StrJoin(names, ",");
}

}  // namespace quern::daemon
