#include "comm/backends/nccl/nccl_ops.h"

#include <algorithm>
#include <vector>

#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/core/math.h"
#include "comm/device/memory.h"

namespace rz::nccl {

namespace {

/// Up to this size latency dominates: all ranks receive all contributions, in one call.
constexpr std::size_t max_single_call_bytes = 32 << 10;
/// Shards are multiples of this many elements, so that shards of an aligned buffer are aligned.
constexpr std::size_t shard_alignment = 16;

const std::byte* at(const ConstBuffer& b, std::size_t element) {
  return static_cast<const std::byte*>(b.data) + element * size_of(b.dtype);
}
std::byte* at(const Buffer& b, std::size_t element) {
  return static_cast<std::byte*>(b.data) + element * size_of(b.dtype);
}

DataType nccl_type(DType t) {
  constexpr DataType types[] = {float32, float64, float16, bfloat16, float8e4m3, float8e5m2,
                                int8,    uint8,   int32,   uint32,   int64,      uint64};
  static_assert(sizeof types / sizeof types[0] == dtype_count);
  return types[static_cast<int>(t)];
}

bool is_f8(DType t) { return t == DType::f8e4m3 || t == DType::f8e5m2; }
bool is_float(DType t) { return t == DType::f32 || t == DType::f64 || t == DType::f16 || t == DType::bf16; }

/// A premul_sum factor as NCCL reads it: one element of the type.
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

/// NCCL operators of one submission; destroys the premul_sum operators created for it.
class NcclReduceOps {
 public:
  explicit NcclReduceOps(NcclComm& comm) : nccl_comm_(comm) {}
  ~NcclReduceOps() {
    for (const RedOp created : created_) try {
        nccl_comm_.call("ncclRedOpDestroy",
                        [&](Comm c) { return nccl_comm_.api().red_op_destroy(created, c); });
      } catch (const NcclError&) {  // the group is failing; ending the communicator releases the operator
      }
  }
  RedOp get(const ReduceOp& op, DType t) {
    constexpr RedOp fixed[] = {nccl::sum, nccl::avg, nccl::prod, nccl::min, nccl::max};
    if (op.kind != ReduceOp::premul_sum) return fixed[op.kind];
    Scalar scalar(op.factor, t);
    RedOp created = 0;
    nccl_comm_.call("ncclRedOpCreatePreMulSum", [&](Comm c) {
      return nccl_comm_.api().red_op_create_pre_mul_sum(&created, &scalar, nccl_type(t),
                                                        scalar_host_immediate, c);
    });
    created_.push_back(created);
    return created;
  }

 private:
  NcclComm& nccl_comm_;
  std::vector<RedOp> created_;
};

}  // namespace

/// The calls between ncclGroupStart and ncclGroupEnd; without calls, no group. Takes no lock:
/// NcclComm::call() holds it.
class NcclOps::GroupCall {
 public:
  GroupCall(const NcclApi& api, Comm comm, const Stream& stream)
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
    if (!begun_) record("ncclGroupStart", api.group_start());
    begun_ = true;
    record(name, f());
  }
  void end() {
    if (begun_) record("ncclGroupEnd", api.group_end());
    if (failed_) throw NcclError{failed_, result_, api.get_error_string(result_)};
  }

  const NcclApi& api;
  const Comm comm;
  void* const native;

 private:
  void record(const char* name, Result result) {
    if (failed_ || result == success || result == in_progress) return;
    failed_ = name;
    result_ = result;
  }
  bool begun_ = false;
  const char* failed_ = nullptr;
  Result result_ = success;
};

template <class F>
void NcclOps::in_group(const Stream& stream, const F& f) const {
  nccl_comm_.call("ncclGroupEnd", [&](Comm comm) {
    GroupCall group(nccl_comm_.api(), comm, stream);
    f(group);
    group.end();
    return success;
  });
  wait_issued_();
}

// ---- choice of the implementation

bool NcclOps::reduces_natively(const CollectiveCall& op) const {
  if (options_.deterministic || options_.size == 1) return false;
  // For integer types NCCL's factor is an integer, too.
  if (op.op.kind == ReduceOp::premul_sum) return is_float(op.in.dtype);
  return !is_f8(op.in.dtype) || options_.has_f8;
}

/// True if NCCL's calls suffice: the operation shares one NCCL group with all others.
bool NcclOps::is_single_group(const CollectiveCall& op) const {
  if (traits(op.kind).reduces) return reduces_natively(op);
  return op.kind != Collective::all_to_all || op.in.data != op.out.data || options_.size == 1;
}

void NcclOps::check(std::span<const CollectiveCall> group) const {
  std::vector<std::size_t> sent, received;  // sends to and receives from this rank itself
  for (const CollectiveCall& op : group) {
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

// ---- chunks of a reduction

/// Elements [offset, offset + size * shard) are reduced one shard per rank; every rank reduces the
/// `remainder` elements that follow itself.
struct Chunk {
  std::size_t offset, shard, remainder;
};

namespace {

/// Elements of a shard such that the workspace holds the gathered shards and as many scaled elements.
std::size_t shard_elements(std::size_t limit, std::size_t ranks, DType t) {
  return std::max(limit / 2 / size_of(t) / ranks / shard_alignment, std::size_t{2}) * shard_alignment -
         shard_alignment;
}

std::vector<Chunk> chunks_of(std::size_t n, std::size_t ranks, DType t, std::size_t limit) {
  if (n * size_of(t) <= max_single_call_bytes) return {{0, 0, n}};
  std::vector<Chunk> all;
  const std::size_t largest = shard_elements(limit, ranks, t);
  for (std::size_t at = 0; at < n;) {
    const std::size_t shard = std::min(largest, (n - at) / ranks / shard_alignment * shard_alignment);
    const std::size_t left = n - at - shard * ranks;
    const std::size_t remainder = left < shard_alignment * ranks ? left : 0;
    all.push_back({at, shard, remainder});
    at += shard * ranks + remainder;
  }
  return all;
}

std::size_t gathered_bytes(const Chunk& s, std::size_t ranks, DType t) {
  return round_up(ranks * (s.shard + round_up(s.remainder, shard_alignment)) * size_of(t), 256);
}

std::size_t scatter_chunk(std::size_t n, std::size_t ranks, DType t, std::size_t limit) {
  return std::min(round_up(n, shard_alignment), shard_elements(limit, ranks, t));
}

}  // namespace

std::size_t NcclOps::workspace_bytes(std::span<const CollectiveCall> group) const {
  const auto ranks = static_cast<std::size_t>(options_.size);
  std::size_t largest = 0;
  for (const CollectiveCall& op : group) {
    if (is_single_group(op) || ranks == 1) continue;
    const DType t = op.in.dtype;
    if (op.kind == Collective::all_reduce || op.kind == Collective::reduce)
      for (const Chunk& s : chunks_of(op.in.count, ranks, t, options_.workspace_limit))
        largest =
            std::max(largest, gathered_bytes(s, ranks, t) + (s.shard * ranks + s.remainder) * size_of(t));
    else  // reduce_scatter, or all_to_all in place
      largest = std::max(
          largest,
          2 * ranks * scatter_chunk(op.in.count / ranks, ranks, t, options_.workspace_limit) * size_of(t));
  }
  return largest;
}

void NcclOps::issue(std::span<const CollectiveCall> group, const Stream& stream, std::byte* scratch) const {
  {
    NcclReduceOps operators(nccl_comm_);
    std::vector<RedOp> ops;
    for (const CollectiveCall& op : group)
      ops.push_back(traits(op.kind).reduces && is_single_group(op) ? operators.get(op.op, op.in.dtype) : 0);
    copy_to_self(group, stream);
    in_group(stream, [&](GroupCall& g) {
      for (std::size_t i = 0; i < group.size(); ++i)
        if (is_single_group(group[i])) issue_native(g, group[i], ops[i]);
    });
  }
  for (const CollectiveCall& op : group)
    if (!is_single_group(op)) issue_ordered(op, stream, scratch);
}

// ---- operations in one NCCL group

/// Operations with an NCCL call of their own; others go to issue_point_to_point().
void NcclOps::issue_native(GroupCall& g, const CollectiveCall& op, RedOp red) const {
  const DataType type = nccl_type(op.in.dtype);
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
      issue_point_to_point(g, op);
  }
}

/// Operations made of sends and receives.
void NcclOps::issue_point_to_point(GroupCall& g, const CollectiveCall& op) const {
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
        g.send(at(op.in, op.counts->send_offsets[d]), op.counts->send_counts[d] * width, peer);
        g.recv(at(op.out, op.counts->recv_offsets[d]), op.counts->recv_counts[d] * width, peer);
      });
      break;
    case Collective::send:
      if (!is_root) g.send(in, op.in.bytes(), op.root);
      break;
    case Collective::recv:
      if (!is_root) g.recv(out, op.out.bytes(), op.root);
      break;
    default:  // a barrier runs on the host backend
      break;
  }
}

/// Copies each operation's data from this rank to itself.
void NcclOps::copy_to_self(std::span<const CollectiveCall> group, const Stream& stream) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  std::vector<const CollectiveCall*> sends, recvs;
  const auto copy = [&](std::byte* to, const std::byte* from, std::size_t bytes) {
    if (to != from) memcpy_async(to, from, bytes, stream);
  };
  for (const CollectiveCall& op : group) {
    const bool is_root = op.root == options_.rank;
    if (op.kind == Collective::gather && is_root)
      copy(at(op.out, me * op.in.count), at(op.in, 0), op.in.bytes());
    if (op.kind == Collective::scatter && is_root)
      copy(at(op.out, 0), at(op.in, me * op.out.count), op.out.bytes());
    if (op.kind == Collective::all_to_all)
      copy(at(op.out, me * (op.in.count / p)), at(op.in, me * (op.in.count / p)), op.in.bytes() / p);
    if (op.kind == Collective::all_to_all_v)
      copy(at(op.out, op.counts->recv_offsets[me]), at(op.in, op.counts->send_offsets[me]),
           op.counts->send_counts[me] * size_of(op.in.dtype));
    if (op.kind == Collective::send && is_root) sends.push_back(&op);
    if (op.kind == Collective::recv && is_root) recvs.push_back(&op);
  }
  for (std::size_t i = 0; i < sends.size(); ++i)
    copy(at(recvs[i]->out, 0), at(sends[i]->in, 0), sends[i]->in.bytes());
}

// ---- operations in several NCCL groups, with kernels in between

void NcclOps::issue_ordered(const CollectiveCall& op, const Stream& stream, std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size);
  if (p == 1) return run_single_rank(op, stream);
  if (op.kind == Collective::all_to_all) return all_to_all_in_place(op, stream, scratch);
  if (op.kind == Collective::reduce_scatter) return reduce_scatter(op, stream, scratch);
  if (op.in.count == 0) return;
  for (const Chunk& s : chunks_of(op.in.count, p, op.in.dtype, options_.workspace_limit))
    reduce_chunk(op, s, stream, scratch);
}

void NcclOps::run_single_rank(const CollectiveCall& op, const Stream& stream) const {
  if (op.op.kind == ReduceOp::premul_sum && op.in.count)
    peer_kernels().scale(op.out.data, op.in.data, op.in.count, op.in.dtype, op.op.factor, stream);
  else if (op.in.data != op.out.data)
    memcpy_async(op.out.data, op.in.data, op.in.bytes(), stream);
}

/// Reduces all ranks' contributions to dst in rank order. This rank's is `own`; the others' lie in
/// `gathered`, `stride` bytes apart.
void NcclOps::reduce_gathered(std::byte* dst, const std::byte* own, const std::byte* gathered,
                              std::size_t stride, std::size_t count, const CollectiveCall& op,
                              const Stream& stream) const {
  std::vector<const void*> sources;
  for (int d = 0; d < options_.size; ++d)
    sources.push_back(d == options_.rank ? own : gathered + static_cast<std::size_t>(d) * stride);
  if (count) peer_kernels().reduce(dst, sources, count, op.in.dtype, op.op.kind, options_.size, stream);
}

/// One chunk of all_reduce or reduce. Shards go to their ranks, are reduced there, and the results go to all
/// ranks (or the root). The remainder goes to all ranks that need it, which reduce it themselves.
void NcclOps::reduce_chunk(const CollectiveCall& op, const Chunk& s, const Stream& stream,
                           std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  const DType t = op.in.dtype;
  const std::size_t width = size_of(t), shard = s.shard * width, remainder = s.remainder * width;
  const bool all = op.kind == Collective::all_reduce, receives = all || op.root == options_.rank;
  const std::byte* src = at(op.in, s.offset);
  if (op.op.kind == ReduceOp::premul_sum) {
    std::byte* scaled = scratch + gathered_bytes(s, p, t);
    peer_kernels().scale(scaled, src, s.shard * p + s.remainder, t, op.op.factor, stream);
    src = scaled;
  }
  std::byte* const remainders = scratch + p * shard;
  const bool one_call = all && shard == 0;
  const std::size_t stride = one_call ? remainder : round_up(s.remainder, shard_alignment) * width;
  in_group(stream, [&](GroupCall& g) {
    if (one_call) return g.all_gather(src, remainders, remainder);
    for (int d = 0; d < options_.size; ++d) {
      if (d == options_.rank) continue;
      const auto peer = static_cast<std::size_t>(d);
      g.send(src + peer * shard, shard, d);
      g.recv(scratch + peer * shard, shard, d);
      if (all || d == op.root) g.send(src + p * shard, remainder, d);
      if (receives) g.recv(remainders + peer * stride, remainder, d);
    }
  });
  std::byte* const out = receives ? at(op.out, s.offset) : nullptr;
  std::byte* const mine = receives ? out + me * shard : scratch + me * shard;
  reduce_gathered(mine, src + me * shard, scratch, shard, s.shard, op, stream);
  if (receives)
    reduce_gathered(out + p * shard, src + p * shard, remainders, stride, s.remainder, op, stream);
  in_group(stream, [&](GroupCall& g) {
    if (all) return g.all_gather(mine, out, shard);
    if (!receives) return g.send(mine, shard, op.root);
    for (int d = 0; d < options_.size; ++d)
      if (d != options_.rank) g.recv(out + static_cast<std::size_t>(d) * shard, shard, d);
  });
}

void NcclOps::reduce_scatter(const CollectiveCall& op, const Stream& stream, std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  const DType t = op.in.dtype;
  const std::size_t width = size_of(t), n = op.out.count;
  const std::size_t largest = scatter_chunk(n, p, t, options_.workspace_limit), stride = largest * width;
  std::byte* const scaled = scratch + p * stride;
  for (std::size_t from = 0; from < n; from += largest) {
    const std::size_t count = std::min(largest, n - from);
    const auto src = [&](std::size_t d) -> const std::byte* {
      return op.op.kind == ReduceOp::premul_sum ? scaled + d * stride : at(op.in, d * n + from);
    };
    if (op.op.kind == ReduceOp::premul_sum)
      for (std::size_t d = 0; d < p; ++d)
        peer_kernels().scale(scaled + d * stride, at(op.in, d * n + from), count, t, op.op.factor, stream);
    in_group(stream, [&](GroupCall& g) {
      for (std::size_t d = 0; d < p; ++d) {
        if (d == me) continue;
        g.send(src(d), count * width, static_cast<int>(d));
        g.recv(scratch + d * stride, count * width, static_cast<int>(d));
      }
    });
    reduce_gathered(at(op.out, from), src(me), scratch, stride, count, op, stream);
  }
}

/// NCCL would receive into data that has not been sent yet, so sends use a copy.
void NcclOps::all_to_all_in_place(const CollectiveCall& op, const Stream& stream, std::byte* scratch) const {
  const auto p = static_cast<std::size_t>(options_.size), me = static_cast<std::size_t>(options_.rank);
  const std::size_t width = size_of(op.in.dtype), n = op.in.count / p;
  const std::size_t largest = scatter_chunk(n, p, op.in.dtype, options_.workspace_limit),
                    stride = largest * width;
  for (std::size_t from = 0; from < n; from += largest) {
    const std::size_t bytes = std::min(largest, n - from) * width;
    for (std::size_t d = 0; d < p; ++d)
      if (d != me) memcpy_async(scratch + d * stride, at(op.in, d * n + from), bytes, stream);
    in_group(stream, [&](GroupCall& g) {
      for (std::size_t d = 0; d < p; ++d) {
        if (d == me) continue;
        g.send(scratch + d * stride, bytes, static_cast<int>(d));
        g.recv(at(op.out, d * n + from), bytes, static_cast<int>(d));
      }
    });
  }
}

}  // namespace rz::nccl
