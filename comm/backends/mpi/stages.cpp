// MPI counts in ints. So a call of parts of n bytes goes in pieces: the k-th moves the k-th piece of every
// part. Parts lie n bytes apart while a piece is shorter, which a datatype of a piece's length and a part's
// extent tells MPI; so no offset is ever a count.

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

constexpr std::size_t max_one_shot_bytes = 128
                                           << 10;  // below, every rank gets everything and combines it all
constexpr std::size_t max_exchange_bytes =
    4 << 20;  // a piece of a part that is combined: bounds what is set aside
constexpr int shard_tag = 3;

using Memory = std::shared_ptr<std::byte>;

/// Parts of a buffer, `stride` bytes apart, of which `bytes` are moved. Lives until the call that uses it
/// ends.
class StridedShards {
 public:
  StridedShards(std::size_t bytes, std::size_t stride) : count_(static_cast<int>(bytes)) {
    if (bytes == stride) return;
    MPI_Datatype piece;
    check(MPI_Type_contiguous(count_, MPI_BYTE, &piece), "MPI_Type_contiguous");
    const int made = MPI_Type_create_resized(piece, 0, static_cast<MPI_Aint>(stride), &type_);
    MPI_Type_free(&piece);
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
  StagePlanner(const CollectiveCall& op, const MpiContext& wire, Operators& operators,
               std::vector<Stage>& stages)
      : op_(op),
        context_(wire),
        operators_(operators),
        dtype_(op.out.data ? op.out.dtype : op.in.dtype),
        element_(size_of(dtype_)),
        max_bytes_(std::max<std::size_t>(wire.max_call_bytes / element_, 1) * element_),
        ranks_(static_cast<std::size_t>(wire.size)),
        own_rank_(static_cast<std::size_t>(wire.rank)),
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
  /// f(begin, bytes) of each piece.
  template <class F>
  static void for_each_chunk(std::size_t bytes, std::size_t most, const F& f) {
    for (std::size_t begin = 0; begin < bytes; begin += most) f(begin, std::min(most, bytes - begin));
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

  /// Combines what all ranks sent, which lies `bytes` apart.
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

  // ---- combined in rank order

  // Each rank combines the part of its number and hands it round (or to the root). What is left over, less
  // than an element a rank, and what is small, goes to all as it is.
  void reduce_rank_ordered(std::size_t bytes) {
    const std::size_t part = bytes * ranks_ <= max_one_shot_bytes ? 0 : bytes / element_ / ranks_ * element_,
                      rest = part * ranks_;
    const Memory set_aside = rooted() && !is_root() ? allocate_host(part) : nullptr;
    const Memory keep[] = {set_aside, scaled_};
    std::byte* mine = set_aside ? set_aside.get() : at(out_, own_rank_ * part);
    reduce_shards(mine, part, keep[0]);
    reduce_remainder(rest, bytes - rest);
    if (rooted())
      gather(mine, out_, part, is_root(), set_aside);
    else
      post_all_gather(out_, out_, part, true);
  }

  void reduce_scatter_rank_ordered(std::size_t part) { reduce_shards(at(out_, 0), part, nullptr); }

  // `keep` lives as long as the stages.
  void reduce_shards(std::byte* to, std::size_t part, const Memory& keep) {
    const std::size_t most =
        std::max(std::min(max_bytes_, max_exchange_bytes) / element_, std::size_t{1}) * element_;
    const Memory all = part ? allocate_host(std::min(most, part) * ranks_) : nullptr;
    for_each_chunk(part, most, [&](std::size_t begin, std::size_t bytes) {
      const auto parts = std::make_shared<StridedShards>(bytes, part);
      add(
          [=, from = at(in_, begin), comm = comm(), scaled = scaled_](Requests& r) {
            post(r, "MPI_Ialltoall", [&](MPI_Request* request) {
              return MPI_Ialltoall(from, parts->count(), parts->type(), all.get(), as_count(bytes), MPI_BYTE,
                                   comm, request);
            });
          },
          [=, self = *this, kept = keep] { self.reduce_received(to + begin, all.get(), bytes); });
    });
  }

  void reduce_remainder(std::size_t first, std::size_t rest) {
    const std::size_t most = std::min(max_bytes_, max_exchange_bytes / element_ * element_);
    const Memory all = rest ? allocate_host(std::min(most, rest) * ranks_) : nullptr;
    for_each_chunk(rest, most, [&](std::size_t begin, std::size_t bytes) {
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

  // ---- combined by MPI

  void reduce_by_mpi(std::size_t bytes) {
    const MPI_Op op = operators_.get(dtype_, op_.op.kind);
    const MPI_Datatype type = datatype(dtype_, op_.op.kind);
    for_each_chunk(bytes, max_bytes_, [&](std::size_t begin, std::size_t piece) {
      const bool receives = !rooted() || is_root();
      std::byte* to = receives ? at(out_, begin) : nullptr;
      const void* from = receives && in_ == out_ ? MPI_IN_PLACE : at(in_, begin);
      const int n = as_count(piece / element_);
      add(
          [=, comm = comm(), root = op_.root, rooted = rooted(), scaled = scaled_](Requests& r) {
            post(r, rooted ? "MPI_Ireduce" : "MPI_Iallreduce", [&](MPI_Request* request) {
              return rooted ? MPI_Ireduce(from, to, n, type, op, root, comm, request)
                            : MPI_Iallreduce(from, to, n, type, op, comm, request);
            });
          },
          [=, self = *this] {
            if (receives) self.divide(to, piece);
          });
    });
  }

  // In place, MPI wants the result at the front of all; so it is set aside. Parts beyond a count go root by
  // root.
  void reduce_scatter_by_mpi(std::size_t part) {
    const MPI_Op op = operators_.get(dtype_, op_.op.kind);
    const MPI_Datatype type = datatype(dtype_, op_.op.kind);
    if (part > max_bytes_) return reduce_scatter_by_roots(part, op, type);
    const bool same_memory = in_ == op_.in.data && in_place(op_, context_.rank, context_.size);
    const Memory set_aside = same_memory ? allocate_host(part) : nullptr;
    void* to = same_memory ? set_aside.get() : out_;
    add(
        [=, in = in_, comm = comm(), n = as_count(part / element_), scaled = scaled_](Requests& r) {
          post(r, "MPI_Ireduce_scatter_block", [&](MPI_Request* request) {
            return MPI_Ireduce_scatter_block(in, to, n, type, op, comm, request);
          });
        },
        [=, self = *this, kept = set_aside] {
          if (kept) std::memcpy(self.out_, kept.get(), part);
          self.divide(self.out_, part);
        });
  }

  void reduce_scatter_by_roots(std::size_t part, MPI_Op op, MPI_Datatype type) {
    for (int root = 0; root < context_.size; ++root)
      for_each_chunk(part, max_bytes_, [&](std::size_t begin, std::size_t piece) {
        const std::byte* from = at(in_, static_cast<std::size_t>(root) * part + begin);
        std::byte* to = root == context_.rank ? at(out_, begin) : nullptr;
        const void* in = from == to ? MPI_IN_PLACE : from;
        add(
            [=, comm = comm(), n = as_count(piece / element_), scaled = scaled_](Requests& r) {
              post(r, "MPI_Ireduce", [&](MPI_Request* request) {
                return MPI_Ireduce(in, to, n, type, op, root, comm, request);
              });
            },
            [=, self = *this] {
              if (to) self.divide(to, piece);
            });
      });
  }

  // ---- moved

  void all_gather(std::size_t part) {
    post_all_gather(in_, out_, part, in_place(op_, context_.rank, context_.size));
  }

  void post_all_gather(const void* in, void* out, std::size_t part, bool in_place) {
    for_each_chunk(part, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto parts = std::make_shared<StridedShards>(bytes, part);
      add([=, comm = comm()](Requests& r) {
        const void* from = in_place ? MPI_IN_PLACE : at(in, begin);
        post(r, "MPI_Iallgather", [&](MPI_Request* request) {
          return MPI_Iallgather(from, as_count(bytes), MPI_BYTE, at(out, begin), parts->count(),
                                parts->type(), comm, request);
        });
      });
    });
  }

  void gather(const void* in, void* out, std::size_t part, bool in_place, const Memory& keep = {}) {
    for_each_chunk(part, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto parts = std::make_shared<StridedShards>(bytes, part);
      add([=, comm = comm(), root = op_.root, to = is_root() ? at(out, begin) : nullptr,
           kept = keep](Requests& r) {
        const void* from = in_place ? MPI_IN_PLACE : at(in, begin);
        post(r, "MPI_Igather", [&](MPI_Request* request) {
          return MPI_Igather(from, as_count(bytes), MPI_BYTE, to, parts->count(), parts->type(), root, comm,
                             request);
        });
      });
    });
  }

  void scatter(std::size_t part) {
    const bool same_memory = is_root() && in_place(op_, context_.rank, context_.size);
    for_each_chunk(part, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto parts = std::make_shared<StridedShards>(bytes, part);
      add([=, comm = comm(), root = op_.root, from = is_root() ? at(in_, begin) : nullptr,
           out = at(out_, begin)](Requests& r) {
        void* to = same_memory ? MPI_IN_PLACE : out;
        post(r, "MPI_Iscatter", [&](MPI_Request* request) {
          return MPI_Iscatter(from, parts->count(), parts->type(), to, as_count(bytes), MPI_BYTE, root, comm,
                              request);
        });
      });
    });
  }

  void broadcast(std::size_t bytes) {
    if (is_root() && in_ != out_) std::memcpy(out_, in_, bytes);
    for_each_chunk(bytes, max_bytes_, [&](std::size_t begin, std::size_t piece) {
      add([=, comm = comm(), root = op_.root, data = at(out_, begin)](Requests& r) {
        post(r, "MPI_Ibcast", [&](MPI_Request* request) {
          return MPI_Ibcast(data, as_count(piece), MPI_BYTE, root, comm, request);
        });
      });
    });
  }

  void all_to_all(std::size_t part) {
    Memory copy;
    if (in_ == out_) {
      copy = allocate_host(part * ranks_);
      std::memcpy(copy.get(), in_, part * ranks_);
    }
    for_each_chunk(part, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
      const auto parts = std::make_shared<StridedShards>(bytes, part);
      add([=, comm = comm(), from = at(copy ? copy.get() : in_, begin), to = at(out_, begin),
           kept = copy](Requests& r) {
        post(r, "MPI_Ialltoall", [&](MPI_Request* request) {
          return MPI_Ialltoall(from, parts->count(), parts->type(), to, parts->count(), parts->type(), comm,
                               request);
        });
      });
    });
  }

  // Only the two ranks of a pair know how much goes between them: first they compare.
  void all_to_all_v() {
    const auto theirs = std::make_shared<std::vector<std::uint64_t>>(ranks_);
    const auto mine = std::make_shared<std::vector<std::uint64_t>>(op_.counts->send_counts.begin(),
                                                                   op_.counts->send_counts.end());
    add(
        [=, comm = comm()](Requests& r) {
          post(r, "MPI_Ialltoall", [&](MPI_Request* request) {
            return MPI_Ialltoall(mine->data(), 1, MPI_UINT64_T, theirs->data(), 1, MPI_UINT64_T, comm,
                                 request);
          });
        },
        [=, self = *this] { self.compare_counts(*theirs); });
    add([self = *this, kept = mine](Requests& r) { self.exchange_shards(r); });
  }

  void compare_counts(const std::vector<std::uint64_t>& theirs) const {
    for (std::size_t r = 0; r < ranks_; ++r)
      require(theirs[r] == op_.counts->recv_counts[r], Errc::mismatch, "mismatched collectives: rank ", r,
              " sends ", theirs[r], " elements in its all_to_all_v, of which rank ", own_rank_, " expects ",
              op_.counts->recv_counts[r], "; every rank must make the same calls in the same order");
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

  // ---- moved in messages

  void move_by_messages(std::size_t part) {
    require(!traits(op_.kind).reduces, Errc::unsupported, "rank ", own_rank_, ": MPI was given memory on ",
            name(op_.in.device), " to combine; copy it to the host");
    if (op_.kind == Collective::broadcast) return broadcast_by_messages(part);
    const bool own_is_there = in_place(op_, context_.rank, context_.size);
    add([=, self = *this](Requests& requests) {
      for (std::size_t i = own_is_there ? 1 : 0; i < self.ranks_; ++i) {
        const std::size_t to = (self.own_rank_ + i) % self.ranks_,
                          from = (self.own_rank_ + self.ranks_ - i) % self.ranks_;
        if (std::byte* const target = self.target(from, part)) self.receive(requests, from, target, part);
        if (const std::byte* source = self.source(to, part)) self.send(requests, to, source, part);
      }
    });
  }

  /// What this rank has for another; null: nothing.
  const std::byte* source(std::size_t to, std::size_t part) const {
    if (op_.kind == Collective::all_gather) return at(in_, 0);
    if (op_.kind == Collective::gather) return static_cast<int>(to) == op_.root ? at(in_, 0) : nullptr;
    if (op_.kind == Collective::scatter && !is_root()) return nullptr;
    return at(in_, to * part);
  }
  /// Where another's comes to.
  std::byte* target(std::size_t from, std::size_t part) const {
    if (op_.kind == Collective::scatter) return static_cast<int>(from) == op_.root ? at(out_, 0) : nullptr;
    if (op_.kind == Collective::gather && !is_root()) return nullptr;
    return at(out_, from * part);
  }

  // A binomial tree: a rank's place, counted from the root, less its lowest bit is whom it has the data from.
  void broadcast_by_messages(std::size_t bytes) {
    const auto root = static_cast<std::size_t>(op_.root);
    const std::size_t place = (own_rank_ + ranks_ - root) % ranks_;
    std::size_t bit = 1;
    while (bit < ranks_ && (place & bit) == 0) bit *= 2;
    if (place > 0)
      add([=, self = *this](Requests& requests) {
        self.receive(requests, (root + place - bit) % self.ranks_, at(self.out_, 0), bytes);
      });
    add([=, self = *this](Requests& requests) {
      const std::byte* const from = at(place > 0 ? self.out_ : self.in_, 0);
      for (std::size_t b = bit / 2; b > 0; b /= 2)
        if (place + b < self.ranks_) self.send(requests, (root + place + b) % self.ranks_, from, bytes);
      if (place > 0 || self.in_ == self.out_) return;
      self.receive(requests, self.own_rank_, at(self.out_, 0), bytes);
      self.send(requests, self.own_rank_, from, bytes);
    });
  }

  const CollectiveCall& op_;
  const MpiContext& context_;
  Operators& operators_;
  const DType dtype_;
  const std::size_t element_, max_bytes_;  // most_: bytes of one count
  const std::size_t ranks_, own_rank_;
  const void* in_;
  void* out_;
  Memory scaled_;
  std::vector<Stage>& stages_;
};

}  // namespace

bool uses_messages(const CollectiveCall& op) {
  if (op.kind == Collective::all_to_all_v) return false;  // always is, so ranks may differ
  return op.in.device.kind != Device::host || op.out.device.kind != Device::host;
}

std::vector<Stage> plan_stages(const CollectiveCall& op, const MpiContext& wire, Operators& operators) {
  std::vector<Stage> stages;
  StagePlanner(op, wire, operators, stages).plan();
  return stages;
}

}  // namespace rz::mpi
