#pragma once
/// The unix socket between two ranks of a node: segments with their descriptors, releases of segments, and
/// wait-for messages. It hangs up when the peer's process ends.

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "comm/net/poller.h"
#include "comm/shared_memory/allocator.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

/// Never blocks. Not thread-safe.
class SegmentSocket {
 public:
  /// Watches the socket with the poller; wait-for messages of `peer` go to the graph.
  SegmentSocket(int peer, UniqueFd, net::Poller&, WaitForGraph&);
  SegmentSocket(const SegmentSocket&) = delete;

  /// Closes the socket, which wakes the peer. A process forked since the construction must not call it.
  void close();
  /// Handles messages if the poller has flagged the socket. Returns true if the peer has hung up.
  bool poll();

  /// Sends the descriptor of an own segment on first use. Returns false if the socket is full now.
  bool send(const Segment&);
  /// These own segments were removed: the peer must unmap those that it has. It consumes the references to a
  /// segment before its owner removes it.
  void release(std::span<const std::uint32_t> numbers);
  /// Continues to send releases.
  void flush_releases();
  /// A segment of the peer, as mapped here; null if its descriptor was not sent. Errc::system if it was lost.
  const SharedMemory* find(std::uint32_t number);
  /// Drops the message if the socket is full.
  void send(const WaitMessage&);

 private:
  void read_messages();

  const int peer_;
  UniqueFd socket_;
  net::FdEvents fd_events_;
  net::Poller& poller_;
  WaitForGraph& wait_graph_;
  bool hung_up_ = false;
  std::unordered_set<std::uint32_t> sent_;                  // own segments whose descriptors the peer has
  std::unordered_map<std::uint32_t, SharedMemory> mapped_;  // the peer's segments, mapped here
  std::vector<std::uint32_t> to_release_;                   // own segments that the peer must unmap
};

}  // namespace rz
