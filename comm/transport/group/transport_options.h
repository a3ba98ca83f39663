#pragma once
/// Options of a group's transport.

#include <memory>
#include <string>

#include "comm/core/reduction_order.h"

namespace rz {

class SharedMemoryAllocator;

struct TransportOptions {
  /// "auto": ranks with equal host ids share memory, other pairs use TCP. "shm": Errc::config names the ranks
  /// on other hosts. "tcp": TCP for every pair.
  std::string kind = "auto";
  /// Interface of TCP: name, address or leading numbers of the address. Empty: see choose_address().
  std::string interface;
  /// TCP sockets for collectives between two hosts, 1 to 16; see sockets_per_peer().
  int sockets = 2;
  /// Ranks with equal ids count as one host. Empty: machine_id().
  std::string host_id;
  /// Forced algorithm of the ranks' calls. Must be equal on all ranks.
  std::string algorithm;
  /// Congestion control of the TCP sockets; see set_congestion_control().
  std::string congestion = "system";
  /// Tuning table as text (comm/tuning/tuning.h). Rank 0's is used; other ranks' must be empty or equal.
  std::string tuning;
  /// Reductions in `reduction_order` only. Both must be equal on all ranks.
  bool deterministic = true;
  ReductionOrder reduction_order = ReductionOrder::rank;
  /// Memory that this rank shares with others already, of the group that this one is split from; null: none.
  std::shared_ptr<SharedMemoryAllocator> memory;
};

}  // namespace rz
