#include "comm/algorithms/hosts.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {

bool hosts_in_a_row(std::span<const int> host) { return std::is_sorted(host.begin(), host.end()); }

Hosts::Hosts(Seat seat) : rank_(seat.rank), host_(seat.host.begin(), seat.host.end()) {
  if (host_.empty()) host_.assign(static_cast<std::size_t>(seat.size), 0);
  for (int r = 0; r < seat.size; ++r) {
    const int h = host_of(r);
    require(h >= 0 && h <= count(), Errc::invalid_argument, "rank ", r, " is on host ", h, ", but only ",
            count(), " hosts come before it");
    if (h == count()) ranks_.emplace_back();
    std::vector<int>& there = ranks_[static_cast<std::size_t>(h)];
    index_.push_back(static_cast<int>(there.size()));
    there.push_back(r);
    largest_ = std::max(largest_, static_cast<int>(there.size()));
  }
  here_ = host_of(rank_);
}

Hosts Hosts::in_a_row(Seat seat, const char* algorithm) {
  require(hosts_in_a_row(seat.host), Errc::invalid_argument, "the algorithm '", algorithm,
          "' sums a host after the other, and so in rank order only where each host holds consecutive ranks");
  return Hosts(seat);
}

std::vector<int> Hosts::neighbours(bool backwards) const {
  const std::vector<int>& all = ranks(here_);
  const int n = static_cast<int>(all.size());
  std::vector<int> others;
  for (int d = 1; d < n; ++d)
    others.push_back(all[static_cast<std::size_t>((index() + (backwards ? n - d : d)) % n)]);
  return others;
}

std::vector<Term> Hosts::of_this_host(Slot mine) const {
  std::vector<Term> terms;
  for (const int r : ranks(here_)) terms.push_back(r == rank_ ? local(mine) : from(r));
  return terms;
}

}  // namespace rz
