// The command line of `quern`.
#ifndef QUERN_CLIENT_APP_H_
#define QUERN_CLIENT_APP_H_

#include <string>
#include <vector>

#include "client/console.h"

namespace quern::client {

// Parses and runs; `arguments` without the program's name. Returns the exit status.
int RunApp(std::vector<std::string> arguments, Console& console);

}  // namespace quern::client

#endif  // QUERN_CLIENT_APP_H_
