#pragma once
/// Point-to-point sends and receives over a transport: one queue per peer and direction, all progressing at
/// once. Messages of one queue complete in order. Not thread safe: the progress engine's driving thread calls
/// all of it.

#include <cstddef>
#include <deque>
#include <vector>

#include "comm/transport/transport.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

class PointToPoint {
 public:
  PointToPoint(Transport& transport, int rank, int size);

  /// Queues a send or recv. finished() reports its `tag` at completion; the buffer must stay valid until
  /// then.
  void add(const CollectiveCall&, void* tag);
  /// Moves data without blocking; true on any progress. Errc::mismatch if a message has another count or type
  /// than its receive.
  bool advance();
  bool idle() const { return pending_ == 0; }
  /// Tags of completed messages, one each. The caller clears the list.
  std::vector<void*>& finished() { return finished_; }
  /// The peers of the pending messages of a tag. The suspect is the lowest of them.
  WaitState waiting_on(const void* tag) const;
  /// Drops all messages, after a failure.
  void clear();

 private:
  struct Message {
    void* tag;
    std::byte* data;
    std::size_t bytes, done = 0;
    std::uint64_t stream_end = 0;  // of a send: PeerQueues::posted after its last byte
    CallSignature signature;
    bool signature_checked = false;
  };
  struct PeerQueues {
    std::deque<Message> sends, receives;
    std::size_t posting = 0;   // index in sends: those before it are posted and not yet released
    std::uint64_t posted = 0;  // bytes, over all sends
    std::uint32_t send_sequence = 0, receive_sequence = 0;
  };

  static bool contains(const std::deque<Message>&, const void* tag);
  bool advance_sends(int peer, PeerQueues&);
  bool advance_receives(int peer, PeerQueues&);
  bool advance_self(PeerQueues&);
  void check(int peer, Message&, const CallSignature& theirs) const;
  void finish(std::deque<Message>&);

  Transport& transport_;
  const int rank_;
  std::vector<PeerQueues> peers_;
  std::size_t pending_ = 0;
  std::vector<void*> finished_;
};

}  // namespace rz
