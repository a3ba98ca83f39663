#pragma once
/// Data movement of collectives as stages: all_gather, gather, scatter, broadcast and both all_to_alls.
///
/// MPI counts are ints, so a call on shards of n bytes is cut into chunks: the k-th MPI call moves the k-th
/// chunk of every shard. A datatype with the length of a chunk and the extent of a shard describes the
/// stride, so no offset is passed as a count.

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/backends/mpi/stages.h"

namespace rz::mpi {

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

inline std::byte* at(const void* base, std::size_t bytes) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(base)) + bytes;
}

inline int as_count(std::size_t n) { return static_cast<int>(n); }

/// Appends the stages of one call to `stages`. Copies of it in stages refer to the call and the context.
/// Sizes of shards are in bytes.
class MovementStages {
 public:
  MovementStages(const CollectiveCall& op, const MpiContext& context, std::vector<Stage>& stages)
      : op_(op),
        context_(context),
        dtype_(op.dtype()),
        element_(size_of(dtype_)),
        max_bytes_(std::max<std::size_t>(context.max_call_bytes / element_, 1) * element_),
        ranks_(static_cast<std::size_t>(context.size)),
        own_rank_(static_cast<std::size_t>(context.rank)),
        in_(op.in.data),
        out_(op.out.data),
        stages_(stages) {}

  /// Stages of a collective that does not reduce, with shards of `bytes`; all_to_all_v needs none.
  void move(std::size_t bytes);
  /// Likewise, of sends and receives; see uses_messages().
  void move_by_messages(std::size_t bytes);
  void all_to_all_v();

 protected:
  bool is_root() const { return context_.rank == op_.root; }
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

  void all_gather(const void* in, void* out, std::size_t shard, bool in_place);
  /// `keep` lives as long as the stages.
  void gather(const void* in, void* out, std::size_t shard, bool in_place, const Memory& keep = {});

  const CollectiveCall& op_;
  const MpiContext& context_;
  const DType dtype_;
  const std::size_t element_, max_bytes_;  // max_bytes_: per MPI call
  const std::size_t ranks_, own_rank_;
  const void* in_;
  void* out_;

 private:
  void scatter(std::size_t shard);
  void broadcast(std::size_t bytes);
  void all_to_all(std::size_t shard);
  void compare_counts(const std::vector<std::uint64_t>& peer_counts) const;
  void exchange_shards(Requests&) const;
  void receive(Requests&, std::size_t from, std::byte* to, std::size_t all) const;
  void send(Requests&, std::size_t to, const std::byte* from, std::size_t all) const;
  const std::byte* source(std::size_t to, std::size_t shard) const;
  std::byte* target(std::size_t from, std::size_t shard) const;
  void broadcast_by_messages(std::size_t bytes);

  std::vector<Stage>& stages_;
};

}  // namespace rz::mpi
