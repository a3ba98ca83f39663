#pragma once
/// send and recv: a header that says what comes, then its bytes, so that two ranks that mean different things
/// find out. Driven by one thread at a time.

#include <mpi.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/backends/mpi/mpi_request.h"

namespace rz::mpi {

class MpiPointToPoint {
 public:
  using CompletionCallback = std::function<void(MpiRequest&)>;

  /// Messages have `comm` for themselves but for collectives, and parts of all_to_all_v, which have another
  /// tag.
  MpiPointToPoint(MPI_Comm comm, int rank, int size, std::size_t max_call_bytes);

  void add(const CollectiveCall&, std::shared_ptr<MpiRequest>);
  /// True if anything moved; calls `ended` for the job of each message that has. Errc::mismatch names the
  /// peer.
  bool advance(const CompletionCallback& ended);
  bool is_idle() const { return pending_ == 0; }

  /// The job with the earliest deadline that waits here, and the peer and direction; null without one.
  struct Overdue {
    const MpiRequest* request = nullptr;
    int peer = -1;
    bool sending = false;
  };
  Overdue earliest_deadline() const;
  /// How many messages to and from the peer have ended.
  std::uint64_t sent(int peer) const { return queues_of(peer).sends_completed; }
  std::uint64_t received(int peer) const { return queues_of(peer).receives_completed; }
  /// True if one waits that a peer, gone after as many of its own calls, will never serve.
  bool can_never_complete(int peer, std::uint64_t peer_sent, std::uint64_t peer_received) const;
  /// Hands over the jobs, and withdraws what MPI lets be withdrawn. What is still under way stays in memory.
  void abandon(const CompletionCallback& ended);

 private:
  struct Header {
    std::uint64_t sequence, count;
    std::uint64_t dtype;
    bool operator==(const Header&) const = default;
  };
  struct Message {
    std::shared_ptr<MpiRequest> request;
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
  bool advance_sends(int peer, PeerQueues&, const CompletionCallback&);
  bool advance_receives(int peer, PeerQueues&, const CompletionCallback&);
  void check_header(int peer, const Message&) const;

  MPI_Comm comm_;
  int rank_;
  std::size_t max_call_bytes_;
  std::vector<PeerQueues> queues_;
  std::size_t pending_ = 0;
};

}  // namespace rz::mpi
