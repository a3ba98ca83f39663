#pragma once
/// The hosts of a group, as the hierarchical schedules of this folder see them.

#include <vector>

#include "comm/schedule/schedule.h"

namespace rz {

/// Whether each host holds consecutive ranks, so that sums of a host after the other are in rank order.
bool ranks_contiguous_by_node(std::span<const int> host);

class NodeMap {
 public:
  /// Of the seat's group. Errc::invalid_argument for a placement that is none (numbers with gaps).
  explicit NodeMap(RankContext);
  /// The same, and Errc::invalid_argument that names the algorithm unless each host holds consecutive ranks.
  static NodeMap contiguous(RankContext, const char* algorithm);

  int count() const { return static_cast<int>(ranks_.size()); }
  /// The seat's own host, and its place among the ranks there.
  int my_node() const { return my_node_; }
  int local_rank() const { return index_of(rank_); }
  bool last() const { return my_node_ == count() - 1; }
  /// The host that is `distance` (any sign, less than their number) further around.
  int around(int distance) const { return (my_node_ + distance + count()) % count(); }

  int node_of(int rank) const { return node_of_rank_[static_cast<std::size_t>(rank)]; }
  int index_of(int rank) const { return index_[static_cast<std::size_t>(rank)]; }
  /// Ascending.
  const std::vector<int>& ranks(int host) const { return ranks_[static_cast<std::size_t>(host)]; }
  /// Ranks of the host that has most.
  int largest() const { return largest_; }
  /// Who has to do with lane `i` on a host: ranks take turns where there are fewer than lanes.
  int lane_owner(int host, int i) const {
    return ranks(host)[static_cast<std::size_t>(i) % ranks(host).size()];
  }

  /// The others of this host, from the next on (backwards: from the one before back).
  std::vector<int> local_peers(bool backwards = false) const;
  /// What this host's ranks hold, in rank order: the next message of each other, and `mine`.
  std::vector<Operand> local_operands(ChunkRef mine) const;

 private:
  int rank_, my_node_ = 0, largest_ = 0;
  std::vector<int> node_of_rank_, index_;  // of each rank
  std::vector<std::vector<int>> ranks_;
};

}  // namespace rz
