#include "comm/intranode/mailbox/call_history.h"

namespace rz::intranode {

std::uint64_t CallHistory::hash_of(const CallSignature& s) {
  std::uint64_t h = 0;
  for (const std::uint64_t word :
       {s.count, static_cast<std::uint64_t>(static_cast<std::uint32_t>(s.root)),
        static_cast<std::uint64_t>(s.kind) | static_cast<std::uint64_t>(s.dtype) << 8 |
            static_cast<std::uint64_t>(s.op) << 16}) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}

}  // namespace rz::intranode
