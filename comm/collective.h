#pragma once
/// The collectives and their traits, and CollectiveCall: one checked call as plain data, passed from the
/// communicator to a backend.

#include <array>
#include <cstdint>
#include <forward_list>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/call_site.h"
#include "core/types.h"
#include "device/stream.h"

namespace rz {

enum class Collective : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  all_to_all_v,
  send,
  recv,
  barrier
};
inline constexpr int collective_count = 12;

/// Number of elements in a rank's buffer of a collective: none; one shard (a count that all ranks agree on);
/// one shard per rank; or given by the counts of the call.
enum class Extent : std::uint8_t { none, shard, shard_per_rank, by_counts };

/// Properties of a collective. All rules that depend on the kind of collective derive from these.
struct CollectiveTraits {
  Collective kind;
  const char* name;
  Extent in = Extent::none, out = Extent::none;
  bool in_at_root = false, out_at_root = false;  ///< only the root has that buffer
  bool reduces = false;                          ///< reduces contributions with a ReduceOp
  bool point_to_point = false;                   ///< between two ranks; `root` is the peer

  /// The data starts or ends at one rank.
  constexpr bool rooted() const { return in_at_root || out_at_root; }
  /// The root sends and does not wait for contributions.
  constexpr bool root_sends() const { return in_at_root; }
  /// True if this rank sends data.
  constexpr bool sends(bool is_root) const { return in_at_root ? is_root : !(out_at_root && is_root); }
  /// Each rank sends different data to each peer.
  constexpr bool sends_per_rank() const { return in == Extent::shard_per_rank || in == Extent::by_counts; }
};

inline constexpr std::array<CollectiveTraits, collective_count> collective_traits{{
    {Collective::all_reduce, "all_reduce", Extent::shard, Extent::shard, false, false, true},
    {Collective::reduce_scatter, "reduce_scatter", Extent::shard_per_rank, Extent::shard, false, false, true},
    {Collective::all_gather, "all_gather", Extent::shard, Extent::shard_per_rank},
    {Collective::broadcast, "broadcast", Extent::shard, Extent::shard, true},
    {Collective::reduce, "reduce", Extent::shard, Extent::shard, false, true, true},
    {Collective::gather, "gather", Extent::shard, Extent::shard_per_rank, false, true},
    {Collective::scatter, "scatter", Extent::shard_per_rank, Extent::shard, true},
    {Collective::all_to_all, "all_to_all", Extent::shard_per_rank, Extent::shard_per_rank},
    {Collective::all_to_all_v, "all_to_all_v", Extent::by_counts, Extent::by_counts},
    {Collective::send, "send", Extent::shard, Extent::none, false, false, false, true},
    {Collective::recv, "recv", Extent::none, Extent::shard, false, false, false, true},
    {Collective::barrier, "barrier"},
}};
constexpr const CollectiveTraits& traits(Collective c) {
  return collective_traits[static_cast<std::size_t>(c)];
}
static_assert([] {
  for (std::size_t i = 0; i < collective_count; ++i)
    if (collective_traits[i].kind != Collective{static_cast<std::uint8_t>(i)}) return false;
  return true;
}());
constexpr const char* name(Collective c) { return traits(c).name; }

/// Counts and offsets of an all_to_all_v, in elements; one entry per rank.
struct AllToAllVCounts {
  std::vector<std::size_t> send_counts, send_offsets, recv_counts, recv_offsets;
};

/// Where the memory of a call is ready and its result is needed: a stream of a device, or the calling
/// thread's own order on the host. The stream outlives the submission of the call.
struct StreamHandle {
  Device device{};
  void* native = nullptr;  ///< a cudaStream_t; null: the device's default stream

  Stream stream() const { return Stream::borrow(device, native); }
};

/// One call whose arguments were checked. Counts are elements of `in.dtype` and `out.dtype`. Plain data: the
/// submitter keeps what it points to until submit() returns, and a backend that goes on after that keeps a
/// CallList.
struct CollectiveCall {
  Collective kind = Collective::barrier;
  ConstBuffer in;
  Buffer out;
  ReduceOp op;
  int root = 0;                             ///< of a rooted collective; the peer of send and recv
  const AllToAllVCounts* counts = nullptr;  ///< all_to_all_v only
  StreamHandle stream;
  CallOrigin origin;

  /// The type of the elements that move; a barrier moves none.
  DType dtype() const { return out.data ? out.dtype : in.dtype; }
};
static_assert(std::is_trivially_copyable_v<CollectiveCall> && sizeof(CollectiveCall) <= 136);

/// Calls, and the counts that they point to.
class CallList {
 public:
  CallList() = default;
  explicit CallList(std::span<const CollectiveCall> calls);
  CallList(CallList&&) noexcept = default;
  CallList& operator=(CallList&&) noexcept = default;

  CollectiveCall& add(const CollectiveCall&);
  CollectiveCall& operator[](std::size_t i) { return calls_[i]; }
  const CollectiveCall& operator[](std::size_t i) const { return calls_[i]; }
  std::size_t size() const { return calls_.size(); }
  auto begin() { return calls_.begin(); }
  auto end() { return calls_.end(); }
  operator std::span<const CollectiveCall>() const { return calls_; }

 private:
  std::vector<CollectiveCall> calls_;
  std::forward_list<AllToAllVCounts> counts_;
};

/// Elements per shard (Extent::shard), the same on all ranks; 0 for all_to_all_v, send, recv and barrier.
std::size_t count_per_rank(const CollectiveCall&, int size);
/// Size of the larger of a rank's input and output, given the size `common` of a shard, in the same unit.
/// Tuning tables use this size.
constexpr std::size_t message_bytes(Collective c, std::size_t common, int size) {
  const CollectiveTraits& t = traits(c);
  const bool parts = t.in == Extent::shard_per_rank || t.out == Extent::shard_per_rank;
  return parts ? common * static_cast<std::size_t>(size) : common;
}
/// True if the rank's shard of one buffer is the other buffer. Always false for all_to_all, which permutes
/// the parts.
bool in_place(const CollectiveCall&, int rank, int size);

/// How a collective would run: the result of Communicator::explain().
struct AlgorithmChoice {
  /// Name of the schedule ("ring"; "schedule:ring" on one node), or the protocol of the intra-node engine:
  /// "one_shot", "two_shot", "staged", "zero_copy" or "single_copy" (comm/tuning/intranode.h).
  std::string algorithm;
  std::string transport;        ///< "shm", "tcp", "shm+tcp"
  std::size_t chunk_bytes = 0;  ///< of a chunk, or of a slice of a schedule; 0: one chunk, or not known
  std::string reason;  ///< such as "built-in table: all_reduce intra-node, up to 64 KiB, up to 2 ranks"
};

}  // namespace rz
