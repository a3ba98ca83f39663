#include "comm/transport/call_signature.h"

#include "comm/core/error.h"

namespace rz {

CallSignature make_signature(const CollectiveCall& op, int size, std::uint32_t sequence,
                             std::uint32_t algorithm) {
  return {.sequence = sequence,
          .root = op.root,
          .count = count_per_rank(op, size),
          .kind = op.kind,
          .dtype = op.dtype(),
          .op = op.op.kind,
          .algorithm = algorithm};
}

std::string describe(const CallSignature& s) {
  const CollectiveTraits& t = traits(s.kind);
  return concat(name(s.kind), " #", s.sequence, " (", s.count, " ", name(s.dtype),
                t.reduces ? concat(", ", name(ReduceOp(s.op))) : "",
                t.rooted() ? concat(", root ", s.root) : "",
                s.algorithm ? concat(", algorithm ", s.algorithm) : "", ")");
}

}  // namespace rz
