// Settings of mimalloc for the programs that use it; linked by quern_fast_allocator.
#include <mimalloc.h>

namespace quern {
namespace {

// How long freed memory waits to be used again before it goes back to the kernel. With mimalloc's own 25 ms, what a stream of the data
// plane frees between two messages goes back each time, and a third of the time of both ends is spent on pages that come and go.
constexpr long kKeepMs = 1000;

// A variable of the environment (MIMALLOC_DECOMMIT_DELAY) goes before it.
[[maybe_unused]] const bool set = (mi_option_set_default(mi_option_decommit_delay, kKeepMs), true);

}  // namespace
}  // namespace quern
