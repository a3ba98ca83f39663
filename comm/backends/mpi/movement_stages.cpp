#include "comm/backends/mpi/movement_stages.h"

#include <cstring>

#include "comm/core/error.h"
#include "comm/schedule/chunk_layout.h"

namespace rz::mpi {

namespace {
constexpr int shard_tag = 3;
}

void MovementStages::move(std::size_t bytes) {
  switch (op_.kind) {
    case Collective::all_gather:
      return all_gather(in_, out_, bytes, in_place(op_, context_.rank, context_.size));
    case Collective::broadcast:
      return broadcast(bytes);
    case Collective::gather:
      return gather(in_, out_, bytes, is_root() && in_place(op_, context_.rank, context_.size));
    case Collective::scatter:
      return scatter(bytes);
    case Collective::all_to_all:
      return all_to_all(bytes);
    default:
      return;
  }
}

void MovementStages::all_gather(const void* in, void* out, std::size_t shard, bool in_place) {
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

void MovementStages::gather(const void* in, void* out, std::size_t shard, bool in_place, const Memory& keep) {
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

void MovementStages::scatter(std::size_t shard) {
  const bool same_memory = is_root() && in_place(op_, context_.rank, context_.size);
  for_each_chunk(shard, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
    const auto shards = std::make_shared<StridedShards>(bytes, shard);
    add([=, comm = comm(), root = op_.root, from = is_root() ? at(in_, begin) : nullptr,
         out = at(out_, begin)](Requests& r) {
      void* to = same_memory ? MPI_IN_PLACE : out;
      post(r, "MPI_Iscatter", [&](MPI_Request* request) {
        return MPI_Iscatter(from, shards->count(), shards->type(), to, as_count(bytes), MPI_BYTE, root, comm,
                            request);
      });
    });
  });
}

void MovementStages::broadcast(std::size_t bytes) {
  if (is_root() && in_ != out_) std::memcpy(out_, in_, bytes);
  for_each_chunk(bytes, max_bytes_, [&](std::size_t begin, std::size_t chunk) {
    add([=, comm = comm(), root = op_.root, data = at(out_, begin)](Requests& r) {
      post(r, "MPI_Ibcast", [&](MPI_Request* request) {
        return MPI_Ibcast(data, as_count(chunk), MPI_BYTE, root, comm, request);
      });
    });
  });
}

void MovementStages::all_to_all(std::size_t shard) {
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
        return MPI_Ialltoall(from, shards->count(), shards->type(), to, shards->count(), shards->type(), comm,
                             request);
      });
    });
  });
}

// Only the two ranks of a pair know the count between them, so counts are exchanged and compared first.
void MovementStages::all_to_all_v() {
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

void MovementStages::compare_counts(const std::vector<std::uint64_t>& peer_counts) const {
  for (std::size_t r = 0; r < ranks_; ++r)
    require(peer_counts[r] == op_.counts->recv_counts[r], Errc::mismatch, "mismatched collectives: rank ", r,
            " sends ", peer_counts[r], " elements in its all_to_all_v, of which rank ", own_rank_,
            " expects ", op_.counts->recv_counts[r],
            "; every rank must make the same calls in the same order");
}

void MovementStages::exchange_shards(Requests& requests) const {
  for (std::size_t i = 0; i < ranks_; ++i) {
    const std::size_t to = (own_rank_ + i) % ranks_, from = (own_rank_ + ranks_ - i) % ranks_;
    receive(requests, from, at(out_, op_.counts->recv_offsets[from] * element_),
            op_.counts->recv_counts[from] * element_);
    send(requests, to, at(in_, op_.counts->send_offsets[to] * element_),
         op_.counts->send_counts[to] * element_);
  }
}

void MovementStages::receive(Requests& requests, std::size_t from, std::byte* to, std::size_t all) const {
  for_each_chunk(all, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
    post(requests, "MPI_Irecv", [&](MPI_Request* request) {
      return MPI_Irecv(to + begin, as_count(bytes), MPI_BYTE, static_cast<int>(from), shard_tag, comm(),
                       request);
    });
  });
}
void MovementStages::send(Requests& requests, std::size_t to, const std::byte* from, std::size_t all) const {
  for_each_chunk(all, max_bytes_, [&](std::size_t begin, std::size_t bytes) {
    post(requests, "MPI_Isend", [&](MPI_Request* request) {
      return MPI_Isend(from + begin, as_count(bytes), MPI_BYTE, static_cast<int>(to), shard_tag, comm(),
                       request);
    });
  });
}

// ---- by sends and receives

void MovementStages::move_by_messages(std::size_t shard) {
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
const std::byte* MovementStages::source(std::size_t to, std::size_t shard) const {
  if (op_.kind == Collective::all_gather) return at(in_, 0);
  if (op_.kind == Collective::gather) return static_cast<int>(to) == op_.root ? at(in_, 0) : nullptr;
  if (op_.kind == Collective::scatter && !is_root()) return nullptr;
  return at(in_, to * shard);
}
/// Where the data of rank `from` is received; null: none.
std::byte* MovementStages::target(std::size_t from, std::size_t shard) const {
  if (op_.kind == Collective::scatter) return static_cast<int>(from) == op_.root ? at(out_, 0) : nullptr;
  if (op_.kind == Collective::gather && !is_root()) return nullptr;
  return at(out_, from * shard);
}

// Binomial tree. With positions counted from the root, the parent of a position is the position without its
// lowest set bit.
void MovementStages::broadcast_by_messages(std::size_t bytes) {
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

}  // namespace rz::mpi
