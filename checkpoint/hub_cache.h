// The local Hugging Face cache.
#ifndef QUERN_CHECKPOINT_HUB_CACHE_H_
#define QUERN_CHECKPOINT_HUB_CACHE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace quern::checkpoint {

// Where it is, by HF_HUB_CACHE, HF_HOME and what else its own programs look at.
std::string HubCacheDirectory();

// Whether `source` has the form org/name[@revision] of what lies there. Looks at no file; a directory may have such a name too.
bool IsHubName(absl::string_view source);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_HUB_CACHE_H_
