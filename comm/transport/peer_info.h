#pragma once
/// Who belongs to the group and where each rank runs, as all ranks told each other through the store.

#include <functional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/random.h"
#include "comm/store.h"
#include "comm/topology.h"
#include "comm/transport/transport_options.h"

namespace rz {

struct PeerInfo {
  JobId job_id{};                     ///< random, made by rank 0
  std::vector<std::string> hosts;     ///< each rank's host id
  std::vector<std::string> machines;  ///< each rank's real machine, whatever its host id
  std::vector<CpuLimits> cpu_limits;  ///< what each rank's thread may use of it
  std::string tuning;                 ///< rank 0's table, for all
  /// More ranks than processors where `rank` runs: on its machine, or, where several machines are containers
  /// of one kernel and share its processors, on that.
  bool oversubscribed(int rank) const;
};

/// Publishes this rank's entry and reads all others. Errc::timeout names the ranks that did not come,
/// Errc::mismatch the first whose version, group size or options differ, and what differs.
PeerInfo exchange_peer_info(int rank, int size, Store&, const TransportOptions&, Deadline);

/// A second round: every rank's value under `what`. `check` is called for each as it comes, before the next
/// is waited for.
std::vector<std::string> store_all_gather(
    int rank, int size, Store&, const std::string& what, const std::string& value, Deadline,
    const std::function<void(int rank, const std::string& value)>& check = nullptr);

}  // namespace rz
