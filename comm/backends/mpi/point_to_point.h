#pragma once
/// send and recv. A message is a header followed by its bytes; the receiver compares the header with its own
/// call to detect mismatches. Used by one thread at a time.

#include <mpi.h>

#include <deque>
#include <string>
#include <vector>

#include "comm/progress/request.h"

namespace rz::mpi {

class MpiPointToPoint {
 public:
  /// Messages use two tags of `comm`; collectives made of sends and receives (stages.h) use another.
  MpiPointToPoint(MPI_Comm comm, int rank, int size, std::size_t max_call_bytes);

  void add(const CollectiveCall&, Request*);
  /// Progresses all messages; true if anything moved. Appends the request of each completed message.
  /// Errc::mismatch names the peer.
  bool advance(std::vector<Request*>& ended);
  bool is_idle() const { return pending_ == 0; }

  /// The pending message whose request has the earliest deadline; a null request if there is none.
  struct Overdue {
    const Request* request = nullptr;
    int peer = -1;
    bool sending = false;
  };
  Overdue earliest_deadline() const;
  /// Number of completed messages to and from the peer.
  std::uint64_t sent(int peer) const { return queues_of(peer).sends_completed; }
  std::uint64_t received(int peer) const { return queues_of(peer).receives_completed; }
  /// True if a pending message will never complete because `peer` departed after these numbers of sends and
  /// receives.
  bool can_never_complete(int peer, std::uint64_t peer_sent, std::uint64_t peer_received) const;
  /// Drops all messages and, if MPI is open, cancels posted receives. Leaks the state of what MPI may still
  /// access.
  void abandon(bool open);

 private:
  struct Header {
    std::uint64_t sequence, count;
    std::uint64_t dtype;
    bool operator==(const Header&) const = default;
  };
  struct Message {
    Request* request = nullptr;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Header header{}, received_header{};
    bool posted = false, transferring = false;
    std::vector<MPI_Request> mpi_requests;
  };
  struct PeerQueues {
    std::deque<Message> sends, receives;
    std::uint64_t sends_added = 0, receives_added = 0, sends_completed = 0, receives_completed = 0;
  };
  const PeerQueues& queues_of(int peer) const { return queues_[static_cast<std::size_t>(peer)]; }
  void post_chunks(int peer, Message&, bool sending);
  bool advance_sends(int peer, PeerQueues&, std::vector<Request*>& ended);
  bool advance_receives(int peer, PeerQueues&, std::vector<Request*>& ended);
  void check_header(int peer, const Message&) const;

  MPI_Comm comm_;
  int rank_;
  std::size_t max_call_bytes_;
  std::vector<PeerQueues> queues_;
  std::size_t pending_ = 0;
};

}  // namespace rz::mpi
