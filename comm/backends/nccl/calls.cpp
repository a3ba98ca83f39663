#include "comm/backends/nccl/calls.h"

#include <algorithm>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/core/memory.h"
#include "comm/core/rounding.h"
#include "comm/kernels/peer_kernels.h"

namespace rz::nccl {

namespace {

/// Up to here latency is all: everybody gets everything, in one call.
constexpr std::size_t small_bytes = 32 << 10;
/// Parts are multiples of so many elements, so that those of aligned buffers are aligned.
constexpr std::size_t grain = 16;

const std::byte* at(const ConstBuffer& b, std::size_t element) {
  return static_cast<const std::byte*>(b.data) + element * size_of(b.dtype);
}
std::byte* at(const Buffer& b, std::size_t element) {
  return static_cast<std::byte*>(b.data) + element * size_of(b.dtype);
}

DataType type_of(DType t) {
  constexpr DataType types[] = {float32, float64, float16, bfloat16, float8e4m3, float8e5m2,
                                int8,    uint8,   int32,   uint32,   int64,      uint64};
  static_assert(sizeof types / sizeof types[0] == dtype_count);
  return types[static_cast<int>(t)];
}

bool is_f8(DType t) { return t == DType::f8e4m3 || t == DType::f8e5m2; }
bool is_float(DType t) { return t == DType::f32 || t == DType::f64 || t == DType::f16 || t == DType::bf16; }

/// A factor as NCCL reads it: one element of the type.
struct Scalar {
  Scalar(double factor, DType t) {
    if (t == DType::f64) f64 = factor;
    if (t == DType::f32) f32 = static_cast<float>(factor);
    if (t == DType::f16) bits = from_f32<f16>(static_cast<float>(factor)).bits;
    if (t == DType::bf16) bits = from_f32<bf16>(static_cast<float>(factor)).bits;
  }
  union {
    double f64 = 0;
    float f32;
    std::uint16_t bits;
  };
};

/// Operators of one submission, those that NCCL makes to order among them.
class Operators {
 public:
  explicit Operators(Link& link) : link_(link) {}
  ~Operators() {
    for (const RedOp made : made_) try {
        link_.call("ncclRedOpDestroy", [&](Comm c) { return link_.api().red_op_destroy(made, c); });
      } catch (const CallFailed&) {  // the group is ending: the communicator takes it along
      }
  }
  RedOp of(const ReduceOp& op, DType t) {
    constexpr RedOp fixed[] = {nccl::sum, nccl::avg, nccl::prod, nccl::min, nccl::max};
    if (op.kind != ReduceOp::premul_sum) return fixed[op.kind];
    Scalar scalar(op.factor, t);
    RedOp made = 0;
    link_.call("ncclRedOpCreatePreMulSum", [&](Comm c) {
      return link_.api().red_op_create_pre_mul_sum(&made, &scalar, type_of(t), scalar_host_immediate, c);
    });
    made_.push_back(made);
    return made;
  }

 private:
  Link& link_;
  std::vector<RedOp> made_;
};

}  // namespace

/// The calls between ncclGroupStart and ncclGroupEnd; no group for none. Without a communicator lock of its
/// own: Link::call has it.
class Calls::Grouped {
 public:
  Grouped(const NcclApi& api, Comm comm, const Stream& stream)
      : api(api), comm(comm), native(stream.native()) {}

  void send(const void* data, std::size_t bytes, int to) {
    if (bytes) call("ncclSend", [&] { return api.send(data, bytes, uint8, to, comm, native); });
  }
  void recv(void* data, std::size_t bytes, int from) {
    if (bytes) call("ncclRecv", [&] { return api.recv(data, bytes, uint8, from, comm, native); });
  }
  void all_gather(const void* in, void* out, std::size_t bytes) {
    if (bytes) call("ncclAllGather", [&] { return api.all_gather(in, out, bytes, uint8, comm, native); });
  }
  template <class F>
  void call(const char* name, const F& f) {
    if (!begun_) note("ncclGroupStart", api.group_start());
    begun_ = true;
    note(name, f());
  }
  void end() {
    if (begun_) note("ncclGroupEnd", api.group_end());
    if (failed_) throw CallFailed{failed_, result_, api.get_error_string(result_)};
  }

  const NcclApi& api;
  const Comm comm;
  void* const native;

 private:
  void note(const char* name, Result result) {
    if (failed_ || result == success || result == in_progress) return;
    failed_ = name;
    result_ = result;
  }
  bool begun_ = false;
  const char* failed_ = nullptr;
  Result result_ = success;
};

template <class F>
void Calls::grouped(const Stream& stream, const F& f) const {
  link_.call("ncclGroupEnd", [&](Comm comm) {
    Grouped group(link_.api(), comm, stream);
    f(group);
    group.end();
    return success;
  });
  settle_();
}

// ---- which way an operation goes

bool Calls::native(const Operation& op) const {
  if (options_.deterministic || options_.size == 1) return false;
  if (op.op.kind == ReduceOp::premul_sum) return is_float(op.in.dtype);  // else NCCL's factor is an integer
  return !is_f8(op.in.dtype) || options_.has_f8;
}

/// In one group with all others: NCCL alone.
bool Calls::simple(const Operation& op) const {
  if (traits(op.kind).reduces) return native(op);
  return op.kind != Collective::all_to_all || op.in.data != op.out.data || options_.size == 1;
}

void Calls::check(std::span<const Operation> group) const {
  std::vector<std::size_t> sent, received;  // to this rank itself
  for (const Operation& op : group) {
    require(op.kind != Collective::barrier, Errc::invalid_argument, "rank ", options_.rank,
            ": a barrier is the host's, not NCCL's");
    if (op.root != options_.rank) continue;
    if (op.kind == Collective::send) sent.push_back(op.in.bytes());
    if (op.kind == Collective::recv) received.push_back(op.out.bytes());
  }
  require(sent == received, Errc::invalid_argument, "rank ", options_.rank,
          " sends to itself without receiving the same in the same group (or the other way round): over NCCL "
          "that would wait for ever; put both into one group()");
}

// ---- how a reduction is cut

/// Elements [at, at + size · part) in a part a rank, then `rest` that every rank combines itself.
struct Slice {
  std::size_t at, part, rest;
};

namespace {

/// Elements a rank, if the memory holds what is gathered, and as much scaled.
std::size_t part_of(std::size_t limit, std::size_t ranks, DType t) {
  return std::max(limit / 2 / size_of(t) / ranks / grain, std::size_t{2}) * grain - grain;
}

std::vector<Slice> slices_of(std::size_t n, std::size_t ranks, DType t, std::size_t limit) {
  if (n * size_of(t) <= small_bytes) return {{0, 0, n}};
  std::vector<Slice> all;
  const std::size_t most = part_of(limit, ranks, t);
  for (std::size_t at = 0; at < n;) {
    const std::size_t part = std::min(most, (n - at) / ranks / grain * grain);
    const std::size_t left = n - at - part * ranks;
    const std::size_t rest = left < grain * ranks ? left : 0;
    all.push_back({at, part, rest});
    at += part * ranks + rest;
  }
  return all;
}

std::size_t gathered_bytes(const Slice& s, std::size_t ranks, DType t) {
  return round_up(ranks * (s.part + round_up(s.rest, grain)) * size_of(t), 256);
}

std::size_t scatter_slice(std::size_t n, std::size_t ranks, DType t, std::size_t limit) {
  return std::min(round_up(n, grain), part_of(limit, ranks, t));
}

}  // namespace

std::size_t Calls::scratch_bytes(std::span<const Operation> group) const {
  const auto ranks = static_cast<std::size_t>(options_.size);
  std::size_t most = 0;
  for (const Operation& op : group) {
    if (simple(op) || ranks == 1) continue;
    const DType t = op.in.dtype;
    if (op.kind == Collective::all_reduce || op.kind == Collective::reduce)
      for (const Slice& s : slices_of(op.in.count, ranks, t, options_.scratch_limit))
        most = std::max(most, gathered_bytes(s, ranks, t) + (s.part * ranks + s.rest) * size_of(t));
    else  // reduce_scatter; all_to_all in place
      most = std::max(most, 2 * ranks * scatter_slice(op.in.count / ranks, ranks, t, options_.scratch_limit) *
                                size_of(t));
  }
  return most;
}

void Calls::issue(std::span<const Operation> group, const Stream& stream, std::byte* scratch) const {
  {
    Operators operators(link_);
    std::vector<RedOp> ops;
    for (const Operation& op : group)
      ops.push_back(traits(op.kind).reduces && simple(op) ? operators.of(op.op, op.in.dtype) : 0);
    copy_own(group, stream);
    grouped(stream, [&](Grouped& g) {
      for (std::size_t i = 0; i < group.size(); ++i)
        if (simple(group[i])) issue_simple(g, group[i], ops[i]);
    });
  }
  for (const Operation& op : group)
    if (!simple(op)) issue_staged(op, stream, scratch);
}

// ---- in one group

/// What NCCL has a call for.
void Calls::issue_simple(Grouped& g, const Operation& op, RedOp red) const {
  const DataType type = type_of(op.in.dtype);
  const auto* in = op.in.data;
  auto* out = op.out.data;
  switch (op.kind) {
    case Collective::all_reduce:
      if (op.in.count)
        g.call("ncclAllReduce",
               [&] { return g.api.all_reduce(in, out, op.in.count, type, red, g.comm, g.native); });
      break;
    case Collective::reduce_scatter:
      if (op.out.count)
        g.call("ncclReduceScatter",
               [&] { return g.api.reduce_scatter(in, out, op.out.count, type, red, g.comm, g.native); });
      break;
    case Collective::reduce:
      if (op.in.count)
        g.call("ncclReduce",
               [&] { return g.api.reduce(in, out, op.in.count, type, red, op.root, g.comm, g.native); });
      break;
    case Collective::all_gather:
      g.all_gather(in, out, op.in.bytes());
      break;
    case Collective::broadcast:
      if (op.out.bytes())
        g.call("ncclBroadcast",
               [&] { return g.api.broadcast(in, out, op.out.bytes(), uint8, op.root, g.comm, g.native); });
      break;
    default:
      issue_messages(g, op);
  }
}

/// What is made of messages.
void Calls::issue_messages(Grouped& g, const Operation& op) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  const bool is_root = op.root == options_.rank;
  const std::size_t width = size_of(op.out.dtype);
  const auto others = [&](const auto& f) {
    for (std::size_t d = 0; d < p; ++d)
      if (d != me) f(d, static_cast<int>(d));
  };
  const auto* in = op.in.data;
  auto* out = op.out.data;
  switch (op.kind) {
    case Collective::gather:
      if (!is_root) return g.send(in, op.in.bytes(), op.root);
      others([&](std::size_t d, int peer) { g.recv(at(op.out, d * op.in.count), op.in.bytes(), peer); });
      break;
    case Collective::scatter:
      if (!is_root) return g.recv(out, op.out.bytes(), op.root);
      others([&](std::size_t d, int peer) { g.send(at(op.in, d * op.out.count), op.out.bytes(), peer); });
      break;
    case Collective::all_to_all:
      others([&](std::size_t d, int peer) {
        g.send(at(op.in, d * (op.in.count / p)), op.in.bytes() / p, peer);
        g.recv(at(op.out, d * (op.in.count / p)), op.in.bytes() / p, peer);
      });
      break;
    case Collective::all_to_all_v:
      others([&](std::size_t d, int peer) {
        g.send(at(op.in, op.pairs->send_offsets[d]), op.pairs->send_counts[d] * width, peer);
        g.recv(at(op.out, op.pairs->recv_offsets[d]), op.pairs->recv_counts[d] * width, peer);
      });
      break;
    case Collective::send:
      if (!is_root) g.send(in, op.in.bytes(), op.root);
      break;
    case Collective::recv:
      if (!is_root) g.recv(out, op.out.bytes(), op.root);
      break;
    default:  // a barrier is the host's
      break;
  }
}

/// What a rank gives to itself.
void Calls::copy_own(std::span<const Operation> group, const Stream& stream) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  std::vector<const Operation*> sends, recvs;
  const auto copy = [&](std::byte* to, const std::byte* from, std::size_t bytes) {
    if (to != from) copy_bytes(to, from, bytes, stream);
  };
  for (const Operation& op : group) {
    const bool is_root = op.root == options_.rank;
    if (op.kind == Collective::gather && is_root)
      copy(at(op.out, me * op.in.count), at(op.in, 0), op.in.bytes());
    if (op.kind == Collective::scatter && is_root)
      copy(at(op.out, 0), at(op.in, me * op.out.count), op.out.bytes());
    if (op.kind == Collective::all_to_all)
      copy(at(op.out, me * (op.in.count / p)), at(op.in, me * (op.in.count / p)), op.in.bytes() / p);
    if (op.kind == Collective::all_to_all_v)
      copy(at(op.out, op.pairs->recv_offsets[me]), at(op.in, op.pairs->send_offsets[me]),
           op.pairs->send_counts[me] * size_of(op.in.dtype));
    if (op.kind == Collective::send && is_root) sends.push_back(&op);
    if (op.kind == Collective::recv && is_root) recvs.push_back(&op);
  }
  for (std::size_t i = 0; i < sends.size(); ++i)
    copy(at(recvs[i]->out, 0), at(sends[i]->in, 0), sends[i]->in.bytes());
}

// ---- in several groups, with kernels in between

void Calls::issue_staged(const Operation& op, const Stream& stream, std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size);
  if (p == 1) return alone(op, stream);
  if (op.kind == Collective::all_to_all) return all_to_all_in_place(op, stream, scratch);
  if (op.kind == Collective::reduce_scatter) return reduce_scatter(op, stream, scratch);
  if (op.in.count == 0) return;
  for (const Slice& s : slices_of(op.in.count, p, op.in.dtype, options_.scratch_limit))
    combine(op, s, stream, scratch);
}

void Calls::alone(const Operation& op, const Stream& stream) const {
  if (op.op.kind == ReduceOp::premul_sum && op.in.count)
    peer_kernels().scale(op.out.data, op.in.data, op.in.count, op.in.dtype, op.op.factor, stream);
  else if (op.in.data != op.out.data)
    copy_bytes(op.out.data, op.in.data, op.in.bytes(), stream);
}

/// dst = the sources in rank order, of which this rank's is `own` and the others' lie `stride` bytes apart.
void Calls::fold(std::byte* dst, const std::byte* own, const std::byte* gathered, std::size_t stride,
                 std::size_t count, const Operation& op, const Stream& stream) const {
  std::vector<const void*> sources;
  for (int d = 0; d < options_.size; ++d)
    sources.push_back(d == options_.rank ? own : gathered + static_cast<std::size_t>(d) * stride);
  if (count) peer_kernels().reduce(dst, sources, count, op.in.dtype, op.op.kind, options_.size, stream);
}

/// A slice of all_reduce or reduce: parts to their ranks, each combined there, and on to who needs them; the
/// rest to all who need it, combined by them.
void Calls::combine(const Operation& op, const Slice& s, const Stream& stream, std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  const DType t = op.in.dtype;
  const std::size_t width = size_of(t), part = s.part * width, rest = s.rest * width;
  const bool all = op.kind == Collective::all_reduce, gets = all || op.root == options_.rank;
  const std::byte* src = at(op.in, s.at);
  if (op.op.kind == ReduceOp::premul_sum) {
    std::byte* scaled = scratch + gathered_bytes(s, p, t);
    peer_kernels().scale(scaled, src, s.part * p + s.rest, t, op.op.factor, stream);
    src = scaled;
  }
  std::byte* const rests = scratch + p * part;
  const bool one_call = all && part == 0;
  const std::size_t stride = one_call ? rest : round_up(s.rest, grain) * width;
  grouped(stream, [&](Grouped& g) {
    if (one_call) return g.all_gather(src, rests, rest);
    for (int d = 0; d < options_.size; ++d) {
      if (d == options_.rank) continue;
      const auto peer = static_cast<std::size_t>(d);
      g.send(src + peer * part, part, d);
      g.recv(scratch + peer * part, part, d);
      if (all || d == op.root) g.send(src + p * part, rest, d);
      if (gets) g.recv(rests + peer * stride, rest, d);
    }
  });
  std::byte* const out = gets ? at(op.out, s.at) : nullptr;
  std::byte* const mine = gets ? out + me * part : scratch + me * part;
  fold(mine, src + me * part, scratch, part, s.part, op, stream);
  if (gets) fold(out + p * part, src + p * part, rests, stride, s.rest, op, stream);
  grouped(stream, [&](Grouped& g) {
    if (all) return g.all_gather(mine, out, part);
    if (!gets) return g.send(mine, part, op.root);
    for (int d = 0; d < options_.size; ++d)
      if (d != options_.rank) g.recv(out + static_cast<std::size_t>(d) * part, part, d);
  });
}

void Calls::reduce_scatter(const Operation& op, const Stream& stream, std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  const DType t = op.in.dtype;
  const std::size_t width = size_of(t), n = op.out.count;
  const std::size_t most = scatter_slice(n, p, t, options_.scratch_limit), stride = most * width;
  std::byte* const scaled = scratch + p * stride;
  for (std::size_t from = 0; from < n; from += most) {
    const std::size_t count = std::min(most, n - from);
    const auto src = [&](std::size_t d) -> const std::byte* {
      return op.op.kind == ReduceOp::premul_sum ? scaled + d * stride : at(op.in, d * n + from);
    };
    if (op.op.kind == ReduceOp::premul_sum)
      for (std::size_t d = 0; d < p; ++d)
        peer_kernels().scale(scaled + d * stride, at(op.in, d * n + from), count, t, op.op.factor, stream);
    grouped(stream, [&](Grouped& g) {
      for (std::size_t d = 0; d < p; ++d) {
        if (d == me) continue;
        g.send(src(d), count * width, static_cast<int>(d));
        g.recv(scratch + d * stride, count * width, static_cast<int>(d));
      }
    });
    fold(at(op.out, from), src(me), scratch, stride, count, op, stream);
  }
}

/// NCCL would receive into what it has not sent yet.
void Calls::all_to_all_in_place(const Operation& op, const Stream& stream, std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  const std::size_t width = size_of(op.in.dtype), n = op.in.count / p;
  const std::size_t most = scatter_slice(n, p, op.in.dtype, options_.scratch_limit), stride = most * width;
  for (std::size_t from = 0; from < n; from += most) {
    const std::size_t bytes = std::min(most, n - from) * width;
    for (std::size_t d = 0; d < p; ++d)
      if (d != me) copy_bytes(scratch + d * stride, at(op.in, d * n + from), bytes, stream);
    grouped(stream, [&](Grouped& g) {
      for (std::size_t d = 0; d < p; ++d) {
        if (d == me) continue;
        g.send(scratch + d * stride, bytes, static_cast<int>(d));
        g.recv(at(op.out, d * n + from), bytes, static_cast<int>(d));
      }
    });
  }
}

}  // namespace rz::nccl
