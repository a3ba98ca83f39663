#include "comm/api/arguments.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/core/error.h"

namespace rz {

namespace {

using plain_detail::has_in;
using plain_detail::has_out;
using plain_detail::shard_of;

// Validates one call. Every message starts with the collective and the rank.
class ArgumentChecks {
 public:
  ArgumentChecks(Collective kind, const Caller& caller)
      : kind_(kind), rank_(caller.rank), size_(caller.size), device_(caller.device) {}

  template <class... T>
  void require(bool ok, const T&... parts) const {
    if (!ok) fail(Errc::invalid_argument, name(kind_), " on rank ", rank_, ": ", parts...);
  }
  void buffer(const char* which, const ConstBuffer& b) const {
    require(b.data != nullptr || b.count == 0, "'", which, "' is null but has ", b.count, " elements");
    if (b.device.kind == Device::host || b.device == device_) return;
    require(false, "'", which, "' is on ", name(b.device), ", but this communicator moves ",
            device_.kind == Device::host ? std::string("host memory")
                                         : concat("memory of ", name(device_), " and the host"));
  }
  void buffers(const ConstBuffer& in, const ConstBuffer& out) const {
    buffer("in", in);
    buffer("out", out);
    require(in.dtype == out.dtype, "'in' holds ", name(in.dtype), " and 'out' ", name(out.dtype));
    if (in.device == out.device) return;
    require(false, "'in' is on ", name(in.device), " and 'out' on ", name(out.device));
  }
  /// A device's memory is reached in a stream of that device, for which a host stream stands for the null
  /// stream; the host's in the caller's order.
  StreamHandle stream(const Stream& given, Device memory) const {
    if (memory.kind == Device::host) return {};
    if (given.device().kind != Device::host && given.device() != memory)
      require(false, "the memory is on ", name(memory), ", but the stream is of ", name(given.device()));
    return {memory, given.native()};
  }
  void root(int root) const {
    require(root >= 0 && root < size_, "root ", root, " is not a rank of 0 to ", size_ - 1);
  }
  void peer(int peer) const {
    require(peer >= 0 && peer < size_, "peer ", peer, " is not a rank of 0 to ", size_ - 1);
  }
  /// Requires whole == size · part.
  void parts(const char* whole_name, std::size_t whole, const char* part_name, std::size_t part) const {
    require(whole == part * static_cast<std::size_t>(size_), "'", whole_name, "' must have ", size_, " x ",
            part, " elements, as many parts as ranks of '", part_name, "', but has ", whole);
  }
  /// The buffers must be disjoint, or allowed_in == allowed_out (the in-place form).
  void overlap(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes,
               const void* allowed_in, const void* allowed_out) const {
    const auto* a = static_cast<const std::byte*>(in);
    const auto* b = static_cast<const std::byte*>(out);
    if (in_bytes == 0 || out_bytes == 0 || a + in_bytes <= b || b + out_bytes <= a) return;
    require(allowed_in == allowed_out,
            "'in' and 'out' overlap, but are not the in-place form of this collective");
  }
  /// The parts of 'out' must be disjoint.
  void apart(std::span<const std::size_t> counts, std::span<const std::size_t> offsets) const {
    std::vector<std::size_t> order;
    for (std::size_t r = 0; r < counts.size(); ++r)
      if (counts[r] > 0) order.push_back(r);
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return offsets[a] < offsets[b]; });
    for (std::size_t i = 1; i < order.size(); ++i) {
      const std::size_t a = order[i - 1], b = order[i];
      require(offsets[b] - offsets[a] >= counts[a], "the parts of rank ", a, " and rank ", b,
              " overlap in 'out'");
    }
  }

 private:
  Collective kind_;
  int rank_, size_;
  Device device_;
};

/// Requires matching counts, and buffers that are disjoint or the in-place form.
void check_both(const ArgumentChecks& check, const CollectiveTraits& t, const Caller& caller,
                const ConstBuffer& in, const Buffer& out) {
  check.buffers(in, out);
  const bool in_parts = t.in == Extent::shard_per_rank, out_parts = t.out == Extent::shard_per_rank;
  if (in_parts && out_parts) {
    check.require(in.count == out.count && in.count % static_cast<std::size_t>(caller.size) == 0,
                  "'in' and 'out' must have as many elements, a multiple of ", caller.size, ", but have ",
                  in.count, " and ", out.count);
    return check.overlap(in.data, in.bytes(), out.data, out.bytes(), in.data, out.data);
  }
  if (in_parts)
    check.parts("in", in.count, "out", out.count);
  else if (out_parts)
    check.parts("out", out.count, "in", in.count);
  else
    check.require(in.count == out.count, "'in' has ", in.count, " elements and 'out' ", out.count);
  const std::size_t shard = in_parts ? out.bytes() : in.bytes();
  check.overlap(in.data, in.bytes(), out.data, out.bytes(), shard_of(in.data, t.in, shard, caller.rank),
                shard_of(out.data, t.out, shard, caller.rank));
}

void check_counts(const ArgumentChecks& check, const Caller& caller, const ConstBuffer& in, const Buffer& out,
                  const AllToAllVCounts& counts) {
  const auto& [send_counts, send_offsets, recv_counts, recv_offsets] = counts;
  const auto ranks = static_cast<std::size_t>(caller.size);
  for (const auto* list : {&send_counts, &send_offsets, &recv_counts, &recv_offsets}) {
    check.require(list->size() == ranks, "counts and offsets need ", ranks, " entries, one per rank, got ",
                  list->size());
    for (const std::size_t n : *list)
      check.require(n <= PTRDIFF_MAX, "counts and offsets are 0 or more, got ",
                    static_cast<std::ptrdiff_t>(n));
  }
  const auto inside = [](std::size_t offset, std::size_t count, std::size_t whole) {
    return offset <= whole && count <= whole - offset;
  };
  for (std::size_t r = 0; r < ranks; ++r) {
    check.require(inside(send_offsets[r], send_counts[r], in.count), "the part for rank ", r,
                  " ends beyond 'in'");
    check.require(inside(recv_offsets[r], recv_counts[r], out.count), "the part of rank ", r,
                  " ends beyond 'out'");
  }
  check.apart(recv_counts, recv_offsets);
  const auto own = static_cast<std::size_t>(caller.rank);
  check.require(send_counts[own] == recv_counts[own], "it sends ", send_counts[own],
                " elements to itself but receives ", recv_counts[own]);
}

}  // namespace

CollectiveCall make_call(const Caller& caller, Collective kind, const ConstBuffer& in, const Buffer& out,
                         int root, ReduceOp op, const Stream& stream) {
  const CollectiveTraits& t = traits(kind);
  const ArgumentChecks check(kind, caller);
  const bool reads = has_in(caller, t, root), writes = has_out(caller, t, root);
  if (t.rooted()) check.root(root);
  if (reads && writes)
    check_both(check, t, caller, in, out);
  else if (reads)
    check.buffer("in", in);
  else
    check.buffer("out", out);
  CollectiveCall call = plain_call(caller, t, in, out, root, op);
  call.in.device = reads ? in.device : out.device;
  call.out.device = writes ? out.device : in.device;
  call.stream = check.stream(stream, writes ? out.device : in.device);
  return call;
}

CallList make_all_to_all_v(const Caller& caller, const ConstBuffer& in, const Counts& send_counts,
                           const Counts& send_offsets, const Buffer& out, const Counts& recv_counts,
                           const Counts& recv_offsets, const Stream& stream) {
  const ArgumentChecks check(Collective::all_to_all_v, caller);
  check.buffers(in, out);
  check.overlap(in.data, in.bytes(), out.data, out.bytes(), nullptr, &check);  // there is no in-place form
  const AllToAllVCounts counts{send_counts.values, send_offsets.values, recv_counts.values,
                               recv_offsets.values};
  check_counts(check, caller, in, out, counts);
  CallList made;
  made.add({.kind = Collective::all_to_all_v,
            .in = in,
            .out = out,
            .counts = &counts,
            .stream = check.stream(stream, out.device)});
  return made;
}

CollectiveCall make_send(const Caller& caller, const ConstBuffer& buffer, int to, const Stream& stream) {
  const ArgumentChecks check(Collective::send, caller);
  check.peer(to);
  check.buffer("buffer", buffer);
  return {.kind = Collective::send, .in = buffer, .root = to, .stream = check.stream(stream, buffer.device)};
}

CollectiveCall make_recv(const Caller& caller, const Buffer& buffer, int from, const Stream& stream) {
  const ArgumentChecks check(Collective::recv, caller);
  check.peer(from);
  check.buffer("buffer", buffer);
  return {
      .kind = Collective::recv, .out = buffer, .root = from, .stream = check.stream(stream, buffer.device)};
}

}  // namespace rz
