#pragma once
/// Validates the arguments of a collective and builds its CollectiveCall. Internal.

#include <span>

#include "comm/collective.h"

namespace rz {

/// The calling rank, and the device of its communicator.
struct Caller {
  int rank, size;
  Device device;
};

/// Build a call from the arguments of the Communicator function of the same name. A buffer that this rank
/// does not need is ignored. Errc::invalid_argument names the collective, the rank and the argument.
CollectiveCall make_call(const Caller&, Collective, const ConstBuffer& in, const Buffer& out, int root,
                         ReduceOp, const Stream&);
CallList make_all_to_all_v(const Caller&, const ConstBuffer& in, std::span<const std::size_t> send_counts,
                           std::span<const std::size_t> send_offsets, const Buffer& out,
                           std::span<const std::size_t> recv_counts,
                           std::span<const std::size_t> recv_offsets, const Stream&);
CollectiveCall make_send(const Caller&, const ConstBuffer&, int to, const Stream&);
CollectiveCall make_recv(const Caller&, const Buffer&, int from, const Stream&);

// ---- fast path, inline: for tiny calls the full validation takes longer than the call

namespace key_detail {

inline const std::byte* at(const void* base, std::size_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}

inline bool is_on_host(const ConstBuffer& b) { return b.data && b.device.kind == Device::host; }

/// Rank `rank`'s shard of a buffer with `extent`.
inline const std::byte* shard_of(const void* base, Extent extent, std::size_t shard_bytes, int rank) {
  return at(base, extent == Extent::shard_per_rank ? shard_bytes * static_cast<std::size_t>(rank) : 0);
}

}  // namespace key_detail

/// Fills `call` and returns true for the common case: host memory of one dtype, matching counts, buffers that
/// are disjoint or the in-place form. This covers all checks of make_call() except the root; the root is part
/// of the key, so a key equal to that of a validated call is valid.
inline bool make_key(const Caller& caller, const CollectiveTraits& t, const ConstBuffer& in,
                     const Buffer& out, int root, const ReduceOp& op, CallKey& call) {
  using namespace key_detail;
  const bool is_root = caller.rank == root, has_in = !t.in_at_root || is_root,
             has_out = !t.out_at_root || is_root;
  const auto n = static_cast<std::size_t>(caller.size);
  const DType dtype = has_out ? out.dtype : in.dtype;
  std::size_t count = t.out == Extent::shard && has_out ? out.count : in.count;
  if (t.in == Extent::shard_per_rank && t.out == Extent::shard_per_rank) count /= n;
  if (has_in && has_out) {
    const std::size_t bytes = count * size_of(dtype);
    const bool fits = in.count == (t.in == Extent::shard_per_rank ? n * count : count) &&
                      out.count == (t.out == Extent::shard_per_rank ? n * count : count);
    const bool moves = t.in == t.out;  // in place means in == out
    const bool same = shard_of(in.data, moves ? Extent::shard : t.in, bytes, caller.rank) ==
                      shard_of(out.data, moves ? Extent::shard : t.out, bytes, caller.rank);
    if (!fits || in.dtype != out.dtype || !is_on_host(in) || !is_on_host(out)) return false;
    if (!same && at(in.data, in.bytes()) > out.data && at(out.data, out.bytes()) > in.data) return false;
  } else if (!(has_in ? is_on_host(in) : is_on_host(out))) {
    return false;
  }
  const void* const from = has_in ? in.data : t.in == Extent::shard ? out.data : nullptr;
  call = {call_key(t.kind, dtype, op.kind, t.rooted() ? root : 0), count, from, has_out ? out.data : nullptr};
  return true;
}

}  // namespace rz
