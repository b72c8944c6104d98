// What a worker reports of a shard, as far as the coordinator looks at it. For tests.
#ifndef QUERN_DAEMON_RPC_TEST_RESULT_H_
#define QUERN_DAEMON_RPC_TEST_RESULT_H_

#include <string>

#include "base/digest.h"
#include "quern/v1/workers.pb.h"

namespace quern::daemon {

// The end of an attempt whose file has this content.
inline quern::v1::AttemptStatus CompletedWith(const quern::v1::DesiredAttempt& attempt, const std::string& content) {
  const quern::v1::WriteShard& shard = attempt.spec().write_shard();
  quern::v1::AttemptStatus status;
  *status.mutable_id() = attempt.id();
  status.set_state(quern::v1::AttemptStatus::COMPLETED);
  quern::v1::TaskResult& result = *status.mutable_result();
  result.set_file_size(content.size());
  result.set_sha256(Sha256Of(content));
  result.set_header_sha256(Sha256Of(shard.header()));
  for (const quern::v1::ShardUnit& unit : shard.units()) {
    if (unit.has_generate()) continue;
    quern::v1::ViewDigest& digest = *result.add_source_digests();
    digest.set_tensor(unit.has_copy() ? unit.copy().source().tensor() : unit.quantize().weight().tensor());
    digest.set_digest(std::string(16, 'd'));
    if (!unit.has_quantize()) continue;
    quern::v1::ModuleError& error = *result.add_errors();
    error.set_module(unit.quantize().module());
    error.set_count(unit.quantize().weight().rows() * unit.quantize().weight().cols());
    error.set_sum_squares(1);
  }
  return status;
}

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_TEST_RESULT_H_
