// For programs that read their command line with CLI11.
#ifndef QUERN_BASE_EMPTY_OPTION_H_
#define QUERN_BASE_EMPTY_OPTION_H_

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace quern {

// INVALID_ARGUMENT when an option of `app`, parsed, was given an empty value: it would pass for one that was not given. With those that a
// variable of the environment may give, too, that is what it means: not the variable's.
inline absl::Status CheckNoEmptyOption(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_envname().empty()) continue;
    for (const std::string& value : option->results()) {
      if (value.empty()) return absl::InvalidArgumentError(absl::StrCat(option->get_name(), ": the value is empty"));
    }
  }
  return absl::OkStatus();
}

}  // namespace quern

#endif  // QUERN_BASE_EMPTY_OPTION_H_
