#pragma once
/// The collectives by name, and one call of one of them as plain data: what the communicator hands to a
/// backend.

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/core/stream.h"
#include "comm/core/types.h"

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
const char* name(Collective);
/// all_reduce, reduce_scatter and reduce: what combines contributions.
bool reduces(Collective);

/// What an all_to_all_v moves between a rank and each of its peers: elements, one entry a rank.
struct PairCounts {
  std::vector<std::size_t> send_counts, send_offsets, recv_counts, recv_offsets;
};

/// One call, already checked. Small: the least messages take less time than clearing a few cache lines.
/// Counts are elements of `in.dtype` / `out.dtype`.
struct Operation {
  Collective kind = Collective::barrier;
  ConstBuffer in;
  Buffer out;
  ReduceOp op;
  int root = 0;                             ///< of a rooted collective; the peer of send and recv
  std::shared_ptr<const PairCounts> pairs;  ///< all_to_all_v only
  Stream stream;
};

/// A call on host memory in brief: what tells it from the one before, as plain words, since the least
/// messages take less time than putting together an Operation.
struct BriefCall {
  std::uint64_t what;  ///< of brief()
  std::size_t count;   ///< elements that all ranks have: of the smaller of input and output
  const void* in;
  void* out;
};
constexpr std::uint64_t brief(Collective kind, DType dtype, ReduceOp::Kind op, int root) {
  return static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(dtype) << 8 |
         static_cast<std::uint64_t>(op) << 16 | std::uint64_t{static_cast<std::uint32_t>(root)} << 32;
}

}  // namespace rz
