#include "sharding/memory/memory_report.h"

#include "comm/core/text.h"

namespace rz {

std::string describe(const MemoryReport& r) {
  return concat("parameters ", human_bytes(r.parameters), ", gradients ", human_bytes(r.gradients),
                r.masters ? ", masters " + human_bytes(r.masters) : "", ", optimizer state ",
                human_bytes(r.optimizer_state), ", transient ", human_bytes(r.transient), " (peak ",
                human_bytes(r.transient_peak), ")");
}

}  // namespace rz
