#include "sharding/model/memory_report.h"

#include "comm/core/text.h"

namespace rz {

namespace {

std::string part(const char* name, std::size_t bytes) {
  return bytes ? concat(", ", name, " ", human_bytes(bytes)) : "";
}

std::string describe(const OffloadedMemory& m) {
  if (m.total() == 0) return "";
  return "; in host memory: " + concat(part("parameters", m.parameters), part("masters", m.masters),
                                       part("optimizer state", m.optimizer_state))
                                    .substr(2);
}

}  // namespace

std::string describe(const MemoryReport& r) {
  return concat("parameters ", human_bytes(r.parameters), ", gradients ", human_bytes(r.gradients),
                part("masters", r.masters), ", optimizer state ", human_bytes(r.optimizer_state),
                ", transient ", human_bytes(r.transient), " (peak ", human_bytes(r.transient_peak), ")",
                describe(r.offloaded),
                r.offload_has_no_effect ? "; offload has no effect: all is in host memory already" : "");
}

}  // namespace rz
