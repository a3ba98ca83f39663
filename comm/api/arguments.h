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
CallList make_all_to_all_v(const Caller&, const ConstBuffer& in, const Counts& send_counts,
                           const Counts& send_offsets, const Buffer& out, const Counts& recv_counts,
                           const Counts& recv_offsets, const Stream&);
CollectiveCall make_send(const Caller&, const ConstBuffer&, int to, const Stream&);
CollectiveCall make_recv(const Caller&, const Buffer&, int from, const Stream&);

// ---- inline: the checks of a tiny call would take longer than the call

namespace plain_detail {

inline const std::byte* at(const void* base, std::size_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}

inline bool is_on_host(const ConstBuffer& b) { return b.data && b.device == Device{}; }

/// Rank `rank`'s shard of a buffer with `extent`.
inline const std::byte* shard_of(const void* base, Extent extent, std::size_t shard_bytes, int rank) {
  return at(base, extent == Extent::shard_per_rank ? shard_bytes * static_cast<std::size_t>(rank) : 0);
}

inline bool has_in(const Caller& caller, const CollectiveTraits& t, int root) {
  return !t.in_at_root || caller.rank == root;
}
inline bool has_out(const Caller& caller, const CollectiveTraits& t, int root) {
  return !t.out_at_root || caller.rank == root;
}

}  // namespace plain_detail

/// True only for arguments that make_call() accepts, and for all of the common case: host memory of one
/// dtype, matching counts, buffers that are disjoint or the in-place form.
inline bool is_plain(const Caller& caller, const CollectiveTraits& t, const ConstBuffer& in,
                     const Buffer& out, int root) {
  using namespace plain_detail;
  const auto n = static_cast<std::size_t>(caller.size);
  if (t.rooted() && (root < 0 || root >= caller.size)) return false;
  if (!has_out(caller, t, root)) return is_on_host(in);
  if (!has_in(caller, t, root)) return is_on_host(out);
  std::size_t count = t.out == Extent::shard ? out.count : in.count;
  if (t.in == Extent::shard_per_rank && t.out == Extent::shard_per_rank) count /= n;
  const std::size_t bytes = count * size_of(out.dtype);
  const bool fits = in.count == (t.in == Extent::shard_per_rank ? n * count : count) &&
                    out.count == (t.out == Extent::shard_per_rank ? n * count : count);
  const bool moves = t.in == t.out;  // in place means in == out
  const bool same = shard_of(in.data, moves ? Extent::shard : t.in, bytes, caller.rank) ==
                    shard_of(out.data, moves ? Extent::shard : t.out, bytes, caller.rank);
  if (!fits || in.dtype != out.dtype || !is_on_host(in) || !is_on_host(out)) return false;
  return same || at(in.data, in.bytes()) <= out.data || at(out.data, out.bytes()) <= in.data;
}

/// What make_call() returns for such arguments, on host memory. Copies field by field: one load of fields
/// that were stored one by one would wait for all earlier stores, those of the last call to shared cache
/// lines included.
inline CollectiveCall plain_call(const Caller& caller, const CollectiveTraits& t, const ConstBuffer& in,
                                 const Buffer& out, int root, const ReduceOp& op) {
  using namespace plain_detail;
  const bool reads = has_in(caller, t, root), writes = has_out(caller, t, root);
  const bool takes_output = !reads && t.in == Extent::shard;
  const DType in_type = reads ? in.dtype : out.dtype, out_type = writes ? out.dtype : in.dtype;
  return {.kind = t.kind,
          .in = {reads          ? in.data
                 : takes_output ? out.data
                                : nullptr,
                 reads          ? in.count
                 : takes_output ? out.count
                                : 0,
                 in_type},
          .out = {writes ? out.data : nullptr, writes ? out.count : 0, out_type},
          .op = op,
          .root = root};
}

}  // namespace rz
