#include "comm/schedule/algorithms/node_map.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz::schedule {

bool ranks_contiguous_by_node(std::span<const int> node) { return std::is_sorted(node.begin(), node.end()); }

NodeMap::NodeMap(RankContext context)
    : rank_(context.rank), node_of_rank_(context.node_of_rank.begin(), context.node_of_rank.end()) {
  if (node_of_rank_.empty()) node_of_rank_.assign(static_cast<std::size_t>(context.size), 0);
  for (int r = 0; r < context.size; ++r) {
    const int h = node_of(r);
    require(h >= 0 && h <= count(), Errc::invalid_argument, "rank ", r, " is on node ", h, ", but only ",
            count(), " nodes come before it");
    if (h == count()) ranks_.emplace_back();
    std::vector<int>& there = ranks_[static_cast<std::size_t>(h)];
    index_.push_back(static_cast<int>(there.size()));
    there.push_back(r);
    largest_ = std::max(largest_, static_cast<int>(there.size()));
  }
  my_node_ = node_of(rank_);
}

NodeMap NodeMap::contiguous(RankContext context, const char* algorithm) {
  require(ranks_contiguous_by_node(context.node_of_rank), Errc::invalid_argument, "the algorithm '",
          algorithm,
          "' sums a node after the other, and so in rank order only where each node holds consecutive ranks");
  return NodeMap(context);
}

std::vector<int> NodeMap::local_peers(bool backwards) const {
  const std::vector<int>& all = ranks(my_node_);
  const int n = static_cast<int>(all.size());
  std::vector<int> others;
  for (int d = 1; d < n; ++d)
    others.push_back(all[static_cast<std::size_t>((local_rank() + (backwards ? n - d : d)) % n)]);
  return others;
}

std::vector<Operand> NodeMap::local_operands(ChunkRef mine) const {
  std::vector<Operand> operands;
  for (const int r : ranks(my_node_)) operands.push_back(r == rank_ ? local(mine) : from(r));
  return operands;
}

}  // namespace rz::schedule
