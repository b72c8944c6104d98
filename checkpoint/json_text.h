// Finds and edits members of a JSON object in its text, so that everything else keeps its bytes: key order, the spelling of numbers,
// a bare Infinity or NaN (which Python writes and JSON libraries reject).
#ifndef QUERN_CHECKPOINT_JSON_TEXT_H_
#define QUERN_CHECKPOINT_JSON_TEXT_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::checkpoint {

// OK when `text` is one JSON value (with Python's Infinity, -Infinity and NaN allowed) nested at most 200 deep, and white space.
absl::Status CheckJsonText(absl::string_view text);

// The text of the value at `key` of the top-level object, or nullopt when there is no such key. With a dotted path
// ("text_config.hidden_size") it descends into objects. INVALID_ARGUMENT when `text` is no valid JSON object.
absl::StatusOr<std::optional<std::string>> GetJsonMember(absl::string_view text, absl::string_view dotted_key);

// Replaces the value of top-level `key`, or adds the member at the end in the style (indentation) of the others. `value` is one JSON
// value, checked; lines behind its first are indented under the member. INVALID_ARGUMENT when the key stands twice, here and in the other
// functions: readers differ in which one counts.
absl::StatusOr<std::string> SetJsonMember(absl::string_view text, absl::string_view key, absl::string_view value);

// Removes a member (dotted path) with its comma; unchanged when it is not there.
absl::StatusOr<std::string> RemoveJsonMember(absl::string_view text, absl::string_view dotted_key);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_JSON_TEXT_H_
