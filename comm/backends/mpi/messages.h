#pragma once
/// send and recv: a header that says what comes, then its bytes, so that two ranks that mean different things
/// find out. Driven by one thread at a time.

#include <mpi.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/backends/mpi/job.h"

namespace rz::mpi {

class Messages {
 public:
  using Ended = std::function<void(Job&)>;

  /// Messages have `comm` for themselves but for collectives, and parts of all_to_all_v, which have another
  /// tag.
  Messages(MPI_Comm comm, int rank, int size, std::size_t most_bytes);

  void add(const Operation&, std::shared_ptr<Job>);
  /// True if anything moved; calls `ended` for the job of each message that has. Errc::mismatch names the
  /// peer.
  bool advance(const Ended& ended);
  bool idle() const { return pending_ == 0; }

  /// The job with the earliest deadline that waits here, and the peer and direction; null without one.
  struct Overdue {
    const Job* job = nullptr;
    int peer = -1;
    bool sending = false;
  };
  Overdue oldest() const;
  /// How many messages to and from the peer have ended.
  std::uint64_t sent(int peer) const { return link(peer).sends_ended; }
  std::uint64_t received(int peer) const { return link(peer).receives_ended; }
  /// True if one waits that a peer, gone after as many of its own calls, will never serve.
  bool in_vain(int peer, std::uint64_t peer_sent, std::uint64_t peer_received) const;
  /// Hands over the jobs, and withdraws what MPI lets be withdrawn. What is still under way stays in memory.
  void give_up(const Ended& ended);

 private:
  struct Header {
    std::uint64_t sequence, count;
    std::uint64_t dtype;
    bool operator==(const Header&) const = default;
  };
  struct Message {
    std::shared_ptr<Job> job;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Header header{}, theirs{};
    bool posted = false, moving = false;
    std::vector<MPI_Request> requests;
  };
  struct Link {
    std::deque<Message> sends, receives;
    std::uint64_t sends_made = 0, receives_made = 0, sends_ended = 0, receives_ended = 0;
  };
  const Link& link(int peer) const { return links_[static_cast<std::size_t>(peer)]; }
  void post_pieces(int peer, Message&, bool sending);
  bool advance_sends(int peer, Link&, const Ended&);
  bool advance_receives(int peer, Link&, const Ended&);
  void compare(int peer, const Message&) const;

  MPI_Comm comm_;
  int rank_;
  std::size_t most_bytes_;
  std::vector<Link> links_;
  std::size_t pending_ = 0;
};

}  // namespace rz::mpi
