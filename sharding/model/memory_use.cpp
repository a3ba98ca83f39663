#include "sharding/model/memory_use.h"

#include <algorithm>

#include "comm/core/text.h"

namespace rz {

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
