#include "comm/backends/fused.h"

#include <cstring>

namespace rz {

bool Fused::fits(const Operation& first, const Operation& op) {
  return op.kind == Collective::all_reduce && op.op.kind != ReduceOp::premul_sum && op.in.count > 0 &&
         op.op.kind == first.op.kind && op.in.dtype == first.in.dtype;
}

const Operation& Fused::begin(std::vector<const Operation*> calls, std::byte* memory) {
  calls_ = std::move(calls);
  std::size_t count = 0;
  std::uint32_t shape = 0;  // so that ranks whose calls have other sizes find out
  for (const Operation* op : calls_) {
    std::memcpy(memory + count * size_of(op->in.dtype), op->in.data, op->in.bytes());
    count += op->in.count;
    shape = (shape ^ static_cast<std::uint32_t>(op->in.count)) * 0x01000193u;
  }
  const Operation& first = *calls_.front();
  all_ = {.kind = Collective::all_reduce,
          .in = {memory, count, first.in.dtype},
          .out = {memory, count, first.in.dtype},
          .op = first.op,
          .root = static_cast<int>(shape >> 1)};
  return all_;
}

void Fused::end() {
  const auto* at = static_cast<const std::byte*>(all_.out.data);
  for (const Operation* op : calls_) {
    std::memcpy(op->out.data, at, op->out.bytes());
    at += op->out.bytes();
  }
}

}  // namespace rz
