// UTF-8: what JSON and the string fields of protocol buffers may hold. Names of files and arguments may be any bytes.
#ifndef QUERN_BASE_UTF8_H_
#define QUERN_BASE_UTF8_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace quern {

// Bytes of the well-formed sequence (Unicode table 3-7) at `position`, which lies inside of `text`; 0 when there is none.
size_t Utf8SequenceLength(absl::string_view text, size_t position);

// Whether `text` is a run of well-formed sequences: no overlong forms, no surrogates, nothing above U+10FFFF.
bool IsValidUtf8(absl::string_view text);

// `text` itself when it is valid, else with every byte outside of printable ASCII as \xHH: for messages.
std::string EscapeUnlessUtf8(absl::string_view text);

}  // namespace quern

#endif  // QUERN_BASE_UTF8_H_
