#include <algorithm>
#include <cstring>

#include "comm/backends/mpi/movement_stages.h"
#include "comm/backends/mpi/stages.h"
#include "comm/core/error.h"
#include "comm/reduce/reduce.h"
#include "comm/schedule/chunk_layout.h"

namespace rz::mpi {

namespace {

// Up to this size in total, every rank receives all contributions and reduces all of them.
constexpr std::size_t max_one_shot_bytes = 128 << 10;
// Chunk of a shard in a rank-ordered reduction; bounds the temporary memory.
constexpr std::size_t max_exchange_bytes = 4 << 20;

/// Reductions, which begin and end with data movement.
class StagePlanner : public MovementStages {
 public:
  StagePlanner(const CollectiveCall& op, const MpiContext& context, Operators& operators,
               std::vector<Stage>& stages)
      : MovementStages(op, context, stages), operators_(operators) {}

  void plan() {
    if (op_.kind == Collective::all_to_all_v) return all_to_all_v();
    const std::size_t bytes = count_per_rank(op_, context_.size) * element_;
    if (bytes == 0) return;
    if (uses_messages(op_)) return move_by_messages(bytes);
    if (!traits(op_.kind).reduces) return move(bytes);
    scale_input();
    if (op_.kind == Collective::reduce_scatter)
      context_.deterministic ? reduce_scatter_rank_ordered(bytes) : reduce_scatter_by_mpi(bytes);
    else
      context_.deterministic ? reduce_rank_ordered(bytes) : reduce_by_mpi(bytes);
  }

 private:
  bool rooted() const { return op_.kind == Collective::reduce; }

  // MPI rounds partial sums: contributions to an average of floats are divided first (AverageStep).
  void scale_input() {
    const bool average = op_.op.kind == ReduceOp::avg && !context_.deterministic;
    const double factor = average ? mean_scale(dtype_, context_.size) : op_.op.factor;
    if (average ? factor == 1 : op_.op.kind != ReduceOp::premul_sum) return;
    if (op_.in.count == 0) return;
    void* to = op_.kind == Collective::all_reduce ? op_.out.data : nullptr;
    if (!to) {
      scaled_ = allocate_host(op_.in.bytes());
      to = scaled_.get();
    }
    scale(to, in_, op_.in.count, dtype_, factor);
    in_ = to;
  }

  /// Reduces the contributions of all ranks, which lie `bytes` apart.
  void reduce_received(void* to, const std::byte* from, std::size_t bytes) const {
    if (ranks_ == 1) return void(std::memcpy(to, from, bytes));
    std::vector<const void*> sources(ranks_);
    for (std::size_t r = 0; r < ranks_; ++r) sources[r] = from + r * bytes;
    reduce(to, sources, bytes / element_, dtype_, op_.op.kind, context_.size);
  }
  void divide(void* data, std::size_t bytes) const {
    const void* sum[] = {data};
    constexpr unsigned char partial[] = {true};
    if (op_.op.kind == ReduceOp::avg)
      reduce(data, sum, bytes / element_, dtype_, ReduceOp::avg, {context_.size, true, partial});
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
      all_gather(out_, out_, shard, true);
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

  Operators& operators_;
  Memory scaled_;
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
