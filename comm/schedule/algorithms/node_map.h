#pragma once
/// The nodes of a group and the ranks on each, for the hierarchical schedules of this folder.

#include <vector>

#include "comm/schedule/schedule.h"

namespace rz::schedule {

/// True if each node has consecutive ranks, so that a reduction node by node is in rank order.
bool ranks_contiguous_by_node(std::span<const int> node);

class NodeMap {
 public:
  /// Nodes of the context's group. Errc::invalid_argument if node numbers have gaps.
  explicit NodeMap(RankContext);
  /// The same; Errc::invalid_argument, which names the algorithm, unless each node has consecutive ranks.
  static NodeMap contiguous(RankContext, const char* algorithm);

  int count() const { return static_cast<int>(ranks_.size()); }
  /// This rank's node, and its index among the ranks there.
  int my_node() const { return my_node_; }
  int local_rank() const { return index_of(rank_); }
  bool last() const { return my_node_ == count() - 1; }
  /// The node at `distance` (of either sign, less than count()) from this one, cyclically.
  int around(int distance) const { return (my_node_ + distance + count()) % count(); }

  int node_of(int rank) const { return node_of_rank_[static_cast<std::size_t>(rank)]; }
  int index_of(int rank) const { return index_[static_cast<std::size_t>(rank)]; }
  /// Ascending.
  const std::vector<int>& ranks(int node) const { return ranks_[static_cast<std::size_t>(node)]; }
  /// Number of ranks on the largest node.
  int largest() const { return largest_; }
  /// The rank that owns lane `i` on a node. Lanes are assigned round-robin if there are more than ranks.
  int lane_owner(int node, int i) const {
    return ranks(node)[static_cast<std::size_t>(i) % ranks(node).size()];
  }

  /// The other ranks of this node, from the next one on, cyclically (backwards: from the previous one down).
  std::vector<int> local_peers(bool backwards = false) const;
  /// Operands of this node's ranks in rank order: the next message of each peer, and `mine`.
  std::vector<Operand> local_operands(ChunkRef mine) const;

 private:
  int rank_, my_node_ = 0, largest_ = 0;
  std::vector<int> node_of_rank_, index_;  // of each rank
  std::vector<std::vector<int>> ranks_;
};

}  // namespace rz::schedule
