#include "comm/backends/native/input_staging.h"

#include <cstring>

#include "comm/reduce/reduce.h"

namespace rz {

std::shared_ptr<std::byte> stage_input(CollectiveCall& call, bool by_schedule, Transport& transport) {
  const bool scaled = call.op.kind == ReduceOp::premul_sum && call.in.count > 0;
  const bool permuted = by_schedule && call.kind == Collective::all_to_all && call.in.data == call.out.data;
  if (!scaled && !permuted) return nullptr;
  if (scaled && call.kind == Collective::all_reduce) {
    scale(call.out.data, call.in.data, call.in.count, call.in.dtype, call.op.factor);
    call.in = call.out;
    return nullptr;
  }
  std::shared_ptr<std::byte> copy = transport.allocate(call.in.bytes());
  if (scaled)
    scale(copy.get(), call.in.data, call.in.count, call.in.dtype, call.op.factor);
  else if (call.in.bytes() > 0)
    std::memcpy(copy.get(), call.in.data, call.in.bytes());
  call.in.data = copy.get();
  return copy;
}

}  // namespace rz
