#include "sharding/model/memory_report.h"

#include <algorithm>

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

namespace {

std::size_t sum_of(const MemoryUse& use, bool on_host) {
  std::size_t sum = 0;
  for (const MemoryPart& p : parts(use))
    if (p.on_host == on_host) sum += p.bytes;
  return sum;
}

}  // namespace

std::vector<MemoryPart> parts(const MemoryUse& use) {
  const MemoryReport& m = use.model;
  return {{"parameters", m.parameters},
          {"masters", m.masters},
          {"gradients", m.gradients},
          {"optimizer state", m.optimizer_state},
          {"transient", m.transient},
          {"activations", use.activations},
          {"buffers", use.buffers},
          {"offloaded parameters", m.offloaded.parameters, true},
          {"offloaded masters", m.offloaded.masters, true},
          {"offloaded optimizer state", m.offloaded.optimizer_state, true}};
}

std::size_t on_device(const MemoryUse& use) { return sum_of(use, false); }
std::size_t on_host(const MemoryUse& use) { return sum_of(use, true); }

MemoryPart largest_part(const MemoryUse& use) {
  const std::vector<MemoryPart> all = parts(use);
  return *std::ranges::max_element(all, {},
                                   [](const MemoryPart& p) { return p.on_host ? std::size_t{0} : p.bytes; });
}

std::string describe(const MemoryUse& use) {
  std::string text = human_bytes(on_device(use));
  const char* separator = ": ";
  for (const MemoryPart& p : parts(use)) {
    if (p.bytes == 0) continue;
    text += concat(separator, p.name, " ", human_bytes(p.bytes));
    separator = ", ";
  }
  return text;
}

}  // namespace rz
