// Who may call which method. A method that has no rule here is answered to nobody, and a test compares the rules with the protocol.
#ifndef QUERN_DAEMON_RPC_METHOD_ROLES_H_
#define QUERN_DAEMON_RPC_METHOD_ROLES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace quern::daemon {

// What the owner of a token is trusted with. Bits of a RoleSet.
enum class Role : uint8_t {
  kRead = 1,    // sees jobs, tasks and workers
  kSubmit = 2,  // names paths, gives and changes jobs; may read too
  kWorker = 4,  // does tasks, reads sources and writes shards
  kAdmin = 8,   // everything
};
using RoleSet = uint8_t;

constexpr RoleSet RolesOf(Role role) { return static_cast<RoleSet>(role); }
constexpr RoleSet operator|(Role a, Role b) { return RolesOf(a) | RolesOf(b); }
constexpr RoleSet operator|(RoleSet a, Role b) { return a | RolesOf(b); }

// "read", "submit", "worker", "admin".
std::optional<Role> ParseRole(absl::string_view text);
// "read,submit"; for messages.
std::string RoleNames(RoleSet roles);

struct MethodRule {
  absl::string_view method;    // "/quern.v1.Jobs/CreateJob"
  RoleSet roles = 0;           // one of these is needed, or kAdmin; 0: everybody may call it
  bool changes_state = false;  // each call leaves a line in the audit log
};

// nullptr: nobody may call it.
const MethodRule* FindMethodRule(absl::string_view method);
const std::vector<MethodRule>& AllMethodRules();

// Whether somebody with `roles` may call the method.
bool Admits(const MethodRule& rule, RoleSet roles);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_METHOD_ROLES_H_
