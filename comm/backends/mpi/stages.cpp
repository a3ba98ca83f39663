// MPI counts are ints, so a call on shards of n bytes is cut into chunks: the k-th MPI call moves the k-th
// chunk of every shard. A datatype with the length of a chunk and the extent of a shard describes the stride,
// so no offset is passed as a count.

#include "comm/backends/mpi/stages.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/core/error.h"
#include "comm/reduce/reduce.h"
#include "comm/schedule/chunk_layout.h"

namespace rz::mpi {

namespace {

// Up to this size in total, every rank receives all contributions and reduces all of them.
constexpr std::size_t max_one_shot_bytes = 128 << 10;
// Chunk of a shard in a rank-ordered reduction; bounds the temporary memory.
constexpr std::size_t max_exchange_bytes = 4 << 20;
constexpr int shard_tag = 3;

using Memory = std::shared_ptr<std::byte>;

/// Describes `bytes` of each shard, at a distance of `stride`. Must outlive the MPI call that uses it.
class StridedShards {
 public:
  StridedShards(std::size_t bytes, std::size_t stride) : count_(static_cast<int>(bytes)) {
    if (bytes == stride) return;
    MPI_Datatype chunk;
    check(MPI_Type_contiguous(count_, MPI_BYTE, &chunk), "MPI_Type_contiguous");
    const int made = MPI_Type_create_resized(chunk, 0, static_cast<MPI_Aint>(stride), &type_);
    MPI_Type_free(&chunk);
    check(made, "MPI_Type_create_resized");
    count_ = 1;
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  StridedShards(const StridedShards&) = delete;
  ~StridedShards() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_;
  MPI_Datatype type_ = MPI_BYTE;
};

std::byte* at(const void* base, std::size_t bytes) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(base)) + bytes;
}

int as_count(std::size_t n) { return static_cast<int>(n); }

class StagePlanner {
 public:
  StagePlanner(const CollectiveCall& op, const MpiContext& context, Operators& operators,
               std::vector<Stage>& stages)
      : op_(op),
        context_(context),
        operators_(operators),
        dtype_(op.dtype()),
        element_(size_of(dtype_)),
        max_bytes_(std::max<std::size_t>(context.max_call_bytes / element_, 1) * element_),
        ranks_(static_cast<std::size_t>(context.size)),
        own_rank_(static_cast<std::size_t>(context.rank)),
        in_(op.in.data),
        out_(op.out.data),
        stages_(stages) {}

  void plan() {
    if (op_.kind == Collective::all_to_all_v) return all_to_all_v();
    const std::size_t bytes = count_per_rank(op_, context_.size) * element_;
    if (bytes == 0) return;
    if (uses_messages(op_)) return move_by_messages(bytes);
    scale_input();
    switch (op_.kind) {
      case Collective::all_reduce:
      case Collective::reduce:
        context_.deterministic ? reduce_rank_ordered(bytes) : reduce_by_mpi(bytes);
        break;
      case Collective::reduce_scatter:
        context_.deterministic ? reduce_scatter_rank_ordered(bytes) : reduce_scatter_by_mpi(bytes);
        break;
      case Collective::all_gather:
        all_gather(bytes);
        break;
      case Collective::broadcast:
        broadcast(bytes);
        break;
      case Collective::gather:
        gather(in_, out_, bytes, is_root() && in_place(op_, context_.rank, context_.size));
        break;
      case Collective::scatter:
        scatter(bytes);
        break;
      case Collective::all_to_all:
        all_to_all(bytes);
        break;
      default:
        break;
    }
  }

 private:
  bool is_root() const { return context_.rank == op_.root; }
  bool rooted() const { return op_.kind == Collective::reduce; }
  MPI_Comm comm() const { return context_.comm; }

  template <class Call>
  static void post(Requests& requests, const char* name, const Call& call) {
    requests.push_back(MPI_REQUEST_NULL);
    check(call(&requests.back()), name);
  }
  template <class F>
  void add(F post, std::function<void()> finish = {}) {
    stages_.push_back({std::move(post), std::move(finish)});
  }
  /// Calls f(begin, bytes) for each chunk.
  template <class F>
  static void for_each_chunk(std::size_t bytes, std::size_t max_chunk, const F& f) {
    for (std::size_t begin = 0; begin < bytes; begin += max_chunk)
      f(begin, std::min(max_chunk, bytes - begin));
  }

  void scale_input() {
    if (op_.op.kind != ReduceOp::premul_sum || !traits(op_.kind).reduces || op_.in.count == 0) return;
    void* to = op_.kind == Collective::all_reduce ? op_.out.data : nullptr;
    if (!to) {
      scaled_ = allocate_host(op_.in.bytes());
      to = scaled_.get();
    }
    scale(to, in_, op_.in.count, dtype_, op_.op.factor);
    in_ = to;
  }

  /// Reduces the contributions of all ranks, which lie `bytes` apart.
  void reduce_received(void* to, const std::byte* from, std::size_t bytes) const {
    if (ranks_ == 1) return void(std::memcpy(to, from, bytes));
    std::vector<const void*> sources(ranks_);
    for (std::size_t r = 0; r < ranks_; ++r) sources[r] = from + r * bytes;
    reduce(to, sources, bytes / element_, dtype_, op_.op.kind, divisor());
  }
  int divisor() const { return op_.op.kind == ReduceOp::avg ? context_.size : 1; }
  void divide(void* data, std::size_t bytes) const {
    const void* source[] = {data};
    if (divisor() > 1) reduce(data, source, bytes / element_, dtype_, ReduceOp::avg, divisor());
  }

  // ---- reductions in rank order

  // Each rank reduces its own shard and sends the result to all ranks (or the root). The remainder (less than
  // an element per rank) and small calls are sent to all ranks unreduced.
  void reduce_rank_ordered(std::size_t bytes) {
    const std::size_t shard = bytes * ranks_ <= max_one_shot_bytes ? 0 : bytes / element_ / ranks_ * element_,
                      begin = shard * ranks_;
    const Memory temporary = rooted() && !is_root() ? allocate_host(shard) : nullptr;
    const Memory keep[] = {temporary, scaled_};
    std::byte* own = temporary ? temporary.get() : at(out_, own_rank_ * shard);
    reduce_shards(own, shard, keep[0]);
    reduce_remainder(begin, bytes - begin);
    if (rooted())
      gather(own, out_, shard, is_root(), temporary);
    else
      post_all_gather(out_, out_, shard, true);
  }

  void reduce_scatter_rank_ordered(std::size_t shard) { reduce_shards(at(out_, 0), shard, nullptr); }

  // `keep` lives as long as the stages.
  void reduce_shards(std::byte* to, std::size_t shard, const Memory& keep) {
    const std::size_t max_chunk =
        std::max(std::min(max_bytes_, max_exchange_bytes) / element_, std::size_t{1}) * element_;
    const Memory all = shard ? allocate_host(std::min(max_chunk, shard) * ranks_) : nullptr;
    for_each_chunk(shard, max_chunk, [&](std::size_t begin, std::size_t bytes) {
      const auto shards = std::make_shared<StridedShards>(bytes, shard);
      add(
          [=, from = at(in_, begin), comm = comm(), scaled = scaled_](Requests& r) {
            post(r, "MPI_Ialltoall", [&](MPI_Request* request) {
              return MPI_Ialltoall(from, shards->count(), shards->type(), all.get(), as_count(bytes),
                                   MPI_BYTE, comm, request);
            });
          },
          [=, self = *this, kept = keep] { self.reduce_received(to + begin, all.get(), bytes); });
    });
  }

  void reduce_remainder(std::size_t first, std::size_t remainder) {
    const std::size_t max_chunk = std::min(max_bytes_, max_exchange_bytes / element_ * element_);
    const Memory all = remainder ? allocate_host(std::min(max_chunk, remainder) * ranks_) : nullptr;
    for_each_chunk(remainder, max_chunk, [&](std::size_t begin, std::size_t bytes) {
      const std::byte* from = at(in_, first + begin);
      std::byte* to = at(out_, first + begin);
      const bool receives = !rooted() || is_root();
      add(
          [=, comm = comm(), root = op_.root, rooted = rooted(), scaled = scaled_](Requests& r) {
            post(r, rooted ? "MPI_Igather" : "MPI_Iallgather", [&](MPI_Request* request) {
              const int n = as_count(bytes);
              return rooted ? MPI_Igather(from, n, MPI_BYTE, all.get(), n, MPI_BYTE, root, comm, request)
                            : MPI_Iallgather(from, n, MPI_BYTE, all.get(), n, MPI_BYTE, comm, request);
            });
          },
          [=, self = *this] {
            if (receives) self.reduce_received(to, all.get(), bytes);
          });
    });
  }

  // ---- reductions by MPI

  void reduce_by_mpi(std::size_t bytes) {
    const MPI_Op op = operators_.get(dtype_, op_.op.kind);
    const MPI_Datatype type = datatype(dtype_, op_.op.kind);
    for_each_chunk(bytes, max_bytes_, [&](std::size_t begin, std::size_t chunk) {
      const bool receives = !rooted() || is_root();
      std::byte* to = receives ? at(out_, begin) : nullptr;
      const void* from = receives && in_ == out_ ? MPI_IN_PLACE : at(in_, begin);
      const int n = as_count(chunk / element_);
      add(
          [=, comm = comm(), root = op_.root, rooted = rooted(), scaled = scaled_](Requests& r) {
            post(r, rooted ? "MPI_Ireduce" : "MPI_Iallreduce", [&](MPI_Request* request) {
              return rooted ? MPI_Ireduce(from, to, n, type, op, root, comm, request)
                            : MPI_Iallreduce(from, to, n, type, op, comm, request);
            });
          },
          [=, self = *this] {
            if (receives) self.divide(to, chunk);
          });
    });
  }

  // In place, MPI would write the result to the front of the buffer, so a temporary is used. Shards beyond
  // one MPI count are reduced root by root.
  void reduce_scatter_by_mpi(std::size_t shard) {
    const MPI_Op op = operators_.get(dtype_, op_.op.kind);
    const MPI_Datatype type = datatype(dtype_, op_.op.kind);
    if (shard > max_bytes_) return reduce_scatter_by_roots(shard, op, type);
    const bool same_memory = in_ == op_.in.data && in_place(op_, context_.rank, context_.size);
    const Memory temporary = same_memory ? allocate_host(shard) : nullptr;
    void* to = same_memory ? temporary.get() : out_;
    add(
        [=, in = in_, comm = comm(), n = as_count(shard / element_), scaled = scaled_](Requests& r) {
          post(r, "MPI_Ireduce_scatter_block", [&](MPI_Request* request) {
            return MPI_Ireduce_scatter_block(in, to, n, type, op, comm, request);
          });
        },
        [=, self = *this, kept = temporary] {
          if (kept) std::memcpy(self.out_, kept.get(), shard);
          self.divide(self.out_, shard);
        });
  }

  void reduce_scatter_by_roots(std::size_t shard, MPI_Op op, MPI_Datatype type) {
    for (int root = 0; root < context_.size; ++root)
      for_each_chunk(shard, max_bytes_, [&](std::size_t begin, std::size_t chunk) {
        const std::byte* from = at(in_, static_cast<std::size_t>(root) * shard + begin);
        std::byte* to = root == context_.rank ? at(out_, begin) : nullptr;
        const void* in = from == to ? MPI_IN_PLACE : from;
        add(
            [=, comm = comm(), n = as_count(chunk / element_), scaled = scaled_](Requests& r) {
              post(r, "MPI_Ireduce", [&](MPI_Request* request) {
                return MPI_Ireduce(in, to, n, type, op, root, comm, request);
              });
            },
            [=, self = *this] {
              if (to) self.divide(to, chunk);
            });
      });
  }

  // ---- data movement

  void all_gather(std::size_t shard) {
    post_all_gather(in_, out_, shard, in_place(op_, context_.rank, context_.size));
  }

  void post_all_gather(const void* in, void* out, std::size_t shard, bool in_place) {
    for_each_chunk(shard, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto shards = std::make_shared<StridedShards>(bytes, shard);
      add([=, comm = comm()](Requests& r) {
        const void* from = in_place ? MPI_IN_PLACE : at(in, begin);
        post(r, "MPI_Iallgather", [&](MPI_Request* request) {
          return MPI_Iallgather(from, as_count(bytes), MPI_BYTE, at(out, begin), shards->count(),
                                shards->type(), comm, request);
        });
      });
    });
  }

  void gather(const void* in, void* out, std::size_t shard, bool in_place, const Memory& keep = {}) {
    for_each_chunk(shard, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto shards = std::make_shared<StridedShards>(bytes, shard);
      add([=, comm = comm(), root = op_.root, to = is_root() ? at(out, begin) : nullptr,
           kept = keep](Requests& r) {
        const void* from = in_place ? MPI_IN_PLACE : at(in, begin);
        post(r, "MPI_Igather", [&](MPI_Request* request) {
          return MPI_Igather(from, as_count(bytes), MPI_BYTE, to, shards->count(), shards->type(), root, comm,
                             request);
        });
      });
    });
  }

  void scatter(std::size_t shard) {
    const bool same_memory = is_root() && in_place(op_, context_.rank, context_.size);
    for_each_chunk(shard, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto shards = std::make_shared<StridedShards>(bytes, shard);
      add([=, comm = comm(), root = op_.root, from = is_root() ? at(in_, begin) : nullptr,
           out = at(out_, begin)](Requests& r) {
        void* to = same_memory ? MPI_IN_PLACE : out;
        post(r, "MPI_Iscatter", [&](MPI_Request* request) {
          return MPI_Iscatter(from, shards->count(), shards->type(), to, as_count(bytes), MPI_BYTE, root,
                              comm, request);
        });
      });
    });
  }

  void broadcast(std::size_t bytes) {
    if (is_root() && in_ != out_) std::memcpy(out_, in_, bytes);
    for_each_chunk(bytes, max_bytes_, [&](std::size_t begin, std::size_t chunk) {
      add([=, comm = comm(), root = op_.root, data = at(out_, begin)](Requests& r) {
        post(r, "MPI_Ibcast", [&](MPI_Request* request) {
          return MPI_Ibcast(data, as_count(chunk), MPI_BYTE, root, comm, request);
        });
      });
    });
  }

  void all_to_all(std::size_t shard) {
    Memory copy;
    if (in_ == out_) {
      copy = allocate_host(shard * ranks_);
      std::memcpy(copy.get(), in_, shard * ranks_);
    }
    for_each_chunk(shard, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto shards = std::make_shared<StridedShards>(bytes, shard);
      add([=, comm = comm(), from = at(copy ? copy.get() : in_, begin), to = at(out_, begin),
           kept = copy](Requests& r) {
        post(r, "MPI_Ialltoall", [&](MPI_Request* request) {
          return MPI_Ialltoall(from, shards->count(), shards->type(), to, shards->count(), shards->type(),
                               comm, request);
        });
      });
    });
  }

  // Only the two ranks of a pair know the count between them, so counts are exchanged and compared first.
  void all_to_all_v() {
    const auto peer_counts = std::make_shared<std::vector<std::uint64_t>>(ranks_);
    const auto own = std::make_shared<std::vector<std::uint64_t>>(op_.counts->send_counts.begin(),
                                                                  op_.counts->send_counts.end());
    add(
        [=, comm = comm()](Requests& r) {
          post(r, "MPI_Ialltoall", [&](MPI_Request* request) {
            return MPI_Ialltoall(own->data(), 1, MPI_UINT64_T, peer_counts->data(), 1, MPI_UINT64_T, comm,
                                 request);
          });
        },
        [=, self = *this] { self.compare_counts(*peer_counts); });
    add([self = *this, kept = own](Requests& r) { self.exchange_shards(r); });
  }

  void compare_counts(const std::vector<std::uint64_t>& peer_counts) const {
    for (std::size_t r = 0; r < ranks_; ++r)
      require(peer_counts[r] == op_.counts->recv_counts[r], Errc::mismatch, "mismatched collectives: rank ",
              r, " sends ", peer_counts[r], " elements in its all_to_all_v, of which rank ", own_rank_,
              " expects ", op_.counts->recv_counts[r],
              "; every rank must make the same calls in the same order");
  }

  void exchange_shards(Requests& requests) const {
    for (std::size_t i = 0; i < ranks_; ++i) {
      const std::size_t to = (own_rank_ + i) % ranks_, from = (own_rank_ + ranks_ - i) % ranks_;
      receive(requests, from, at(out_, op_.counts->recv_offsets[from] * element_),
              op_.counts->recv_counts[from] * element_);
      send(requests, to, at(in_, op_.counts->send_offsets[to] * element_),
           op_.counts->send_counts[to] * element_);
    }
  }

  void receive(Requests& requests, std::size_t from, std::byte* to, std::size_t all) const {
    for_each_chunk(all, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      post(requests, "MPI_Irecv", [&](MPI_Request* request) {
        return MPI_Irecv(to + begin, as_count(bytes), MPI_BYTE, static_cast<int>(from), shard_tag, comm(),
                         request);
      });
    });
  }
  void send(Requests& requests, std::size_t to, const std::byte* from, std::size_t all) const {
    for_each_chunk(all, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      post(requests, "MPI_Isend", [&](MPI_Request* request) {
        return MPI_Isend(from + begin, as_count(bytes), MPI_BYTE, static_cast<int>(to), shard_tag, comm(),
                         request);
      });
    });
  }

  // ---- data movement by sends and receives

  void move_by_messages(std::size_t shard) {
    require(!traits(op_.kind).reduces, Errc::unsupported, "rank ", own_rank_, ": MPI was given memory on ",
            name(op_.in.device), " to combine; copy it to the host");
    if (op_.kind == Collective::broadcast) return broadcast_by_messages(shard);
    const bool own_in_place = in_place(op_, context_.rank, context_.size);
    add([=, self = *this](Requests& requests) {
      for (std::size_t i = own_in_place ? 1 : 0; i < self.ranks_; ++i) {
        const std::size_t to = (self.own_rank_ + i) % self.ranks_,
                          from = (self.own_rank_ + self.ranks_ - i) % self.ranks_;
        if (std::byte* const target = self.target(from, shard)) self.receive(requests, from, target, shard);
        if (const std::byte* source = self.source(to, shard)) self.send(requests, to, source, shard);
      }
    });
  }

  /// This rank's data for rank `to`; null: none.
  const std::byte* source(std::size_t to, std::size_t shard) const {
    if (op_.kind == Collective::all_gather) return at(in_, 0);
    if (op_.kind == Collective::gather) return static_cast<int>(to) == op_.root ? at(in_, 0) : nullptr;
    if (op_.kind == Collective::scatter && !is_root()) return nullptr;
    return at(in_, to * shard);
  }
  /// Where the data of rank `from` is received; null: none.
  std::byte* target(std::size_t from, std::size_t shard) const {
    if (op_.kind == Collective::scatter) return static_cast<int>(from) == op_.root ? at(out_, 0) : nullptr;
    if (op_.kind == Collective::gather && !is_root()) return nullptr;
    return at(out_, from * shard);
  }

  // Binomial tree. With positions counted from the root, the parent of a position is the position without its
  // lowest set bit.
  void broadcast_by_messages(std::size_t bytes) {
    const auto root = static_cast<std::size_t>(op_.root);
    const std::size_t position = (own_rank_ + ranks_ - root) % ranks_;
    std::size_t bit = 1;
    while (bit < ranks_ && (position & bit) == 0) bit *= 2;
    if (position > 0)
      add([=, self = *this](Requests& requests) {
        self.receive(requests, (root + position - bit) % self.ranks_, at(self.out_, 0), bytes);
      });
    add([=, self = *this](Requests& requests) {
      const std::byte* const from = at(position > 0 ? self.out_ : self.in_, 0);
      for (std::size_t b = bit / 2; b > 0; b /= 2)
        if (position + b < self.ranks_) self.send(requests, (root + position + b) % self.ranks_, from, bytes);
      if (position > 0 || self.in_ == self.out_) return;
      self.receive(requests, self.own_rank_, at(self.out_, 0), bytes);
      self.send(requests, self.own_rank_, from, bytes);
    });
  }

  const CollectiveCall& op_;
  const MpiContext& context_;
  Operators& operators_;
  const DType dtype_;
  const std::size_t element_, max_bytes_;  // max_bytes_: per MPI call
  const std::size_t ranks_, own_rank_;
  const void* in_;
  void* out_;
  Memory scaled_;
  std::vector<Stage>& stages_;
};

}  // namespace

bool uses_messages(const CollectiveCall& op) {
  if (op.kind == Collective::all_to_all_v) return false;  // always uses messages; need not match across ranks
  return op.in.device.kind != Device::host || op.out.device.kind != Device::host;
}

std::vector<Stage> plan_stages(const CollectiveCall& op, const MpiContext& context, Operators& operators) {
  std::vector<Stage> stages;
  StagePlanner(op, context, operators, stages).plan();
  return stages;
}

}  // namespace rz::mpi
