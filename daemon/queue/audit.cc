#include "daemon/queue/audit.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/digest.h"

namespace quern::daemon {

bool ChosenForAudit(absl::string_view job_identity, uint32_t task, double fraction) {
  if (fraction <= 0) return false;
  Sha256 sha;
  sha.Update("quern audit");
  sha.Update(job_identity);
  const unsigned char number[4] = {static_cast<unsigned char>(task >> 24), static_cast<unsigned char>(task >> 16),
                                   static_cast<unsigned char>(task >> 8), static_cast<unsigned char>(task)};
  sha.Update(absl::string_view(reinterpret_cast<const char*>(number), sizeof(number)));
  const std::string digest = sha.Finish();
  uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = bits << 8 | static_cast<unsigned char>(digest[i]);
  // 53 bits are exact in a double, and the quotient is below 1.
  return std::ldexp(static_cast<double>(bits >> 11), -53) < fraction;
}

absl::Status CheckAuditFraction(double fraction) {
  if (fraction >= 0 && fraction <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the fraction of tasks to audit is 0 to 1, not ", fraction));
}

}  // namespace quern::daemon
