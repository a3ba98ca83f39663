#include "tools/rzrun/agents/join_request.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "comm/core/text.h"

namespace rz::rzrun {
namespace {

std::set<int> ranks_taken(const std::vector<JoinRequest>& hosts) {
  std::set<int> taken;
  for (const JoinRequest& h : hosts)
    if (h.node_rank >= 0) taken.insert(h.node_rank);
  return taken;
}

}  // namespace

std::string difference(const JoinRequest& own, const JoinRequest& other) {
  const auto differ = [&](const char* what, const std::string& here, const std::string& there) {
    return concat("the hosts differ in ", what, ": ", here, " on ", own.host, ", ", there, " on ",
                  other.host);
  };
  const std::string nodes = nodes_text(own.min_nodes, own.max_nodes),
                    others_nodes = nodes_text(other.min_nodes, other.max_nodes);
  if (own.id != other.id) return differ("--rdzv-id", own.id, other.id);
  if (nodes != others_nodes) return differ("--nnodes", nodes, others_nodes);
  if (own.max_restarts != other.max_restarts)
    return differ("--max-restarts", concat(own.max_restarts), concat(other.max_restarts));
  if (own.role != other.role) return differ("--role", own.role, other.role);
  if (own.command.empty() || other.command.empty() || own.command.front() == other.command.front()) return "";
  return differ("the program", own.command.front(), other.command.front());
}

std::string refusal(const std::vector<JoinRequest>& hosts, const JoinRequest& other) {
  const int max = hosts.front().max_nodes;
  for (const JoinRequest& h : hosts)
    if (h.node_rank >= 0 && h.node_rank == other.node_rank)
      return concat("--node-rank ", h.node_rank, " is that of two hosts: ", h.host, " and ", other.host);
  if (other.node_rank >= max)
    return concat("--node-rank ", other.node_rank, " on ", other.host, ": --nnodes ",
                  nodes_text(hosts.front().min_nodes, max), " has node ranks up to ", max - 1);
  if (static_cast<int>(hosts.size()) >= max)
    return concat("the job has its ", max, max == 1 ? " host" : " hosts", " without ", other.host);
  return "";
}

std::vector<int> node_numbers(const std::vector<JoinRequest>& hosts) {
  auto taken = ranks_taken(hosts);
  std::vector<int> wished;
  int free = 0;
  for (const JoinRequest& h : hosts) {
    if (h.node_rank < 0)
      while (taken.contains(free)) ++free;
    wished.push_back(h.node_rank < 0 ? free : h.node_rank);
    taken.insert(wished.back());
  }
  std::vector<int> numbers;
  for (const int w : wished)
    numbers.push_back(static_cast<int>(std::ranges::count_if(wished, [&](int other) { return other < w; })));
  return numbers;
}

std::string missing(const std::vector<JoinRequest>& hosts) {
  const int min = hosts.front().min_nodes, count = min - static_cast<int>(hosts.size());
  const auto taken = ranks_taken(hosts);
  const bool have_ranks = std::ranges::all_of(hosts.begin() + 1, hosts.end(),
                                              [](const JoinRequest& h) { return h.node_rank >= 0; });
  if (!have_ranks || hosts.front().min_nodes != hosts.front().max_nodes || taken.empty())
    return concat(count, count == 1 ? " host is" : " hosts are");
  std::string list;
  for (int r = 0; r < min; ++r)
    if (!taken.contains(r)) list += concat(list.empty() ? "" : ", ", r);
  return concat(count == 1 ? "node rank " : "node ranks ", list, count == 1 ? " is" : " are");
}

bool LastCall::may_start(std::size_t hosts, Clock::time_point now) {
  if (hosts < min_) start_.reset();
  if (hosts >= min_ && !start_) start_ = now + last_call_;
  return hosts >= max_ || (start_ && now >= *start_);
}

}  // namespace rz::rzrun
