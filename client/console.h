// Where a command prints, and what the terminal is like. Results go to `out`, progress and messages to `err`.
#ifndef QUERN_CLIENT_CONSOLE_H_
#define QUERN_CLIENT_CONSOLE_H_

#include <ostream>

#include "base/clock.h"

namespace quern::client {

struct Console {
  std::ostream& out;
  std::ostream& err;
  bool err_is_terminal = false;
  int err_width = 80;
  Clock* clock = Clock::Real();
};

}  // namespace quern::client

#endif  // QUERN_CLIENT_CONSOLE_H_
