#pragma once
/// Sends and receives between two ranks: one queue a peer and direction, all of them moving at once.

#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace rz {

class PointToPoint {
 public:
  PointToPoint(Transport& transport, int rank, int size);

  /// `tag` comes back from take_finished(). The operation's memory must stay until then.
  void add(const CollectiveCall&, void* tag);
  /// Moves what can be moved; true if anything was. Errc::mismatch if a message has another length or type.
  bool advance();
  bool idle() const { return pending_ == 0; }
  /// Tags of the messages that ended since the last call.
  std::vector<void*>& finished() { return finished_; }
  /// The peers of pending messages of this tag; one of them, or -1; and all in words.
  RankSet debtors(const void* tag) const;
  int culprit(const void* tag) const;
  std::string waiting_for(const void* tag) const;
  void clear();

 private:
  struct Message {
    void* tag;
    std::byte* data;
    std::size_t bytes, done = 0;
    std::uint64_t stream_end = 0;
    CallSignature signature;
    bool signature_checked = false;
  };
  struct PeerQueues {
    std::deque<Message> sends, receives;
    std::size_t posting = 0;  // sends before it are posted and wait to be released
    std::uint64_t posted = 0;
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
