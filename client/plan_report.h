// A plan for people: what each pattern matched, what becomes of every tensor and why, the shards, memory and disk.
#ifndef QUERN_CLIENT_PLAN_REPORT_H_
#define QUERN_CLIENT_PLAN_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "google/protobuf/repeated_field.h"
#include "quern/v1/jobs.pb.h"
#include "quern/v1/plan.pb.h"

namespace quern::client {

// Tensors whose names differ only in numbers and that have the same fate for the same reason.
struct FateGroup {
  std::string name;  // for example "model.layers.{1-47}.mlp.experts.{0-255}.gate_proj.weight"
  uint64_t count = 0;
  std::string shape;            // "[1024, 3072]", or "various"
  quern::v1::TensorFate first;  // of the group: fate, reason, scheme, role and dtype are everyone's
};

// In the order of their first tensors.
std::vector<FateGroup> GroupFates(const google::protobuf::RepeatedPtrField<quern::v1::TensorFate>& fates);

// `all`: a line a tensor instead of a line a group.
std::string FormatPlan(const quern::v1::PlanJobResponse& plan, bool all);

std::string FormatInspection(const quern::v1::InspectCheckpointResponse& response);

}  // namespace quern::client

#endif  // QUERN_CLIENT_PLAN_REPORT_H_
