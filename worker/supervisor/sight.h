// The worker's proof that it sees the same files as the coordinator.
#ifndef QUERN_WORKER_SUPERVISOR_SIGHT_H_
#define QUERN_WORKER_SUPERVISOR_SIGHT_H_

#include "base/path_map.h"
#include "quern/v1/workers.pb.h"

namespace quern::worker {

// The most samples that one challenge may ask for; more is "not seen".
inline constexpr int kMaxSightSamples = 4096;

// Reads the samples of the challenge and digests them; where the challenge wants it, makes a file in its directory and removes it again.
// `paths` leads from the coordinator's paths to those here. A file that cannot be read, is no regular file or has another size is "not
// seen", as is a directory that takes no file or has a link on the way to it (below what `paths` maps to), with the reason in `detail`.
// Blocks on the file's filesystem.
quern::v1::SightAnswer AnswerSight(const quern::v1::SightChallenge& challenge, const PathMap& paths);

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_SIGHT_H_
