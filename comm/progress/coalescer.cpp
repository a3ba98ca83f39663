#include "comm/progress/coalescer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <ranges>

#include "comm/core/error.h"

namespace rz {

namespace {

struct Bytes {
  std::uintptr_t begin = 0, end = 0;
  Bytes() = default;
  Bytes(const void* at, std::size_t bytes)
      : begin(reinterpret_cast<std::uintptr_t>(at)), end(begin + bytes) {}
  bool overlaps(const Bytes& o) const { return begin < o.end && o.begin < end; }
  void add(const Bytes& o) {
    begin = end == 0 ? o.begin : std::min(begin, o.begin);
    end = std::max(end, o.end);
  }
};
Bytes read_by(const CollectiveCall& op) { return {op.in.data, op.in.bytes()}; }
Bytes written_by(const CollectiveCall& op) { return {op.out.data, op.out.bytes()}; }

bool is_collective(const CollectiveCall& op) {
  return op.kind != Collective::send && op.kind != Collective::recv;
}

/// Throws if one of these calls, which run as one, reads the result of an earlier one. `number` maps a call
/// to its number in the group.
template <class Iterator, class Number>
void require_independent_run(Iterator first, Iterator last, const Number& number) {
  Bytes results;  // smallest range that holds all results so far
  for (auto at = first; at != last; results.add(written_by(*at)), ++at) {
    const Bytes input = read_by(*at);
    if (!input.overlaps(results)) continue;
    const auto writer =
        std::find_if(first, at, [&](const CollectiveCall& op) { return written_by(op).overlaps(input); });
    if (writer != at)
      fail(Errc::invalid_argument, "call ", number(*at), " of the group reads the result of call ",
           number(*writer), ", and both run at once; launch it after that call has ended");
  }
}

}  // namespace

void Coalescer::require_independent(std::span<const CollectiveCall> group) {
  if (group.size() < 2) return;
  const auto number = [&](const CollectiveCall& op) { return 1 + (&op - group.data()); };
  auto calls = group | std::views::filter(is_collective);
  for (auto first = calls.begin(); first != calls.end();) {
    const std::size_t n = count(std::ranges::subrange(first, calls.end()));
    const auto last = std::next(first, static_cast<std::ptrdiff_t>(std::max<std::size_t>(n, 1)));
    require_independent_run(first, last, number);
    first = last;
  }
}

bool Coalescer::is_fusable(const CollectiveCall& first, const CollectiveCall& op) {
  return op.kind == Collective::all_reduce && op.op.kind != ReduceOp::premul_sum && op.in.count > 0 &&
         op.op.kind == first.op.kind && op.in.dtype == first.in.dtype;
}

const CollectiveCall& Coalescer::begin(std::vector<const CollectiveCall*> calls, std::byte* memory) {
  calls_ = std::move(calls);
  std::size_t count = 0;
  std::uint32_t shape = 0;  // hash of the counts, as `root`: ranks with other counts detect the mismatch
  for (const CollectiveCall* op : calls_) {
    std::memcpy(memory + count * size_of(op->in.dtype), op->in.data, op->in.bytes());
    count += op->in.count;
    shape = (shape ^ static_cast<std::uint32_t>(op->in.count)) * 0x01000193u;
  }
  const CollectiveCall& first = *calls_.front();
  fused_call_ = {.kind = Collective::all_reduce,
                 .in = {memory, count, first.in.dtype},
                 .out = {memory, count, first.in.dtype},
                 .op = first.op,
                 .root = static_cast<int>(shape >> 1),
                 .origin = first.origin};
  return fused_call_;
}

void Coalescer::end() {
  const auto* at = static_cast<const std::byte*>(fused_call_.out.data);
  for (const CollectiveCall* op : calls_) {
    std::memcpy(op->out.data, at, op->out.bytes());
    at += op->out.bytes();
  }
}

}  // namespace rz
