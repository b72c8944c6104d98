// Experts that are modules of their own, brought into the tensors that hold all experts of a layer: for models whose loaders know no other
// form of plain weights.
#ifndef QUERN_DAEMON_PLANNER_STACK_EXPERTS_H_
#define QUERN_DAEMON_PLANNER_STACK_EXPERTS_H_

#include "checkpoint/family.h"
#include "daemon/planner/selection.h"
#include "quant/scheme.h"

namespace quern::daemon {

// Gives the experts of a selection their places in stacks, where the family has them as stacks only; `plain` stores their values. They move
// to the end of the selection, each stack's together in the order of its bytes. Experts of a layer that make no whole stack stay as they
// are, with a warning that says why.
void StackExperts(const checkpoint::Family& family, const quant::Scheme* plain, Selection& selection);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_STACK_EXPERTS_H_
