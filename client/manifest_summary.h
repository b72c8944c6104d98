// What a finished output's quern_manifest.json says, in a few lines.
#ifndef QUERN_CLIENT_MANIFEST_SUMMARY_H_
#define QUERN_CLIENT_MANIFEST_SUMMARY_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::client {

struct ManifestSummary {
  struct Scheme {
    uint64_t modules = 0;
    uint64_t weights = 0;
    double sum_squared_error = 0;
    double sum_squares = 0;
    double max_abs_error = 0;
  };
  struct Module {
    std::string name;
    double sum_squared_error = 0;
    double sum_squares = 0;
    double max_abs_error = 0;
    double relative_error() const { return sum_squares > 0 ? sum_squared_error / sum_squares : 0; }
  };

  uint64_t files = 0;
  uint64_t bytes = 0;
  uint64_t copied = 0;
  uint64_t dropped = 0;
  std::map<std::string, Scheme> schemes;  // by canonical text
  std::vector<Module> worst;              // largest relative squared error first
};

// Keeps one entry of the file in memory at a time. DATA_LOSS where the text is no manifest.
absl::StatusOr<ManifestSummary> SummarizeManifest(absl::string_view json, size_t worst_modules);

// Reads the manifest in a directory.
absl::StatusOr<ManifestSummary> ReadManifestSummary(const std::string& directory, size_t worst_modules);

std::string FormatManifestSummary(const ManifestSummary& summary);

}  // namespace quern::client

#endif  // QUERN_CLIENT_MANIFEST_SUMMARY_H_
