#pragma once
/// Short control messages between the ranks of a communicator, beside its collectives: progress queries,
/// failures, departures. Used by one thread at a time.

#include <mpi.h>

#include <chrono>
#include <functional>
#include <list>
#include <string>

#include "comm/transport/transport.h"

namespace rz::mpi {

struct ControlMessage {
  enum Kind : std::int32_t {
    query,      ///< requests the receiver's state of call number `sequence`
    reply,      ///< to a query: the call's signature if `found`; the rank has made `calls` calls
    gathering,  ///< before the split of number `sequence`: `stage`; a refusal has code, culprit and text
    failure,  ///< the group has failed: code, culprit, text; the sender had completed its first `calls` calls
    departure  ///< a rank's last message: it made `calls` calls, all completed, and destroys its communicator
  };
  /// The first member of the new group asks the others, which answer when they are in split(). It then
  /// starts all, or refuses. The answer is to the question, so a rank that has left split() gives none.
  enum Stage : std::int32_t { question, answer, start, refusal };
  Kind kind = query;
  Stage stage = question;
  std::int32_t code = 0, culprit = -1, found = 0;
  std::uint64_t calls = 0;
  std::uint64_t sent = 0, received = 0;  ///< of a departure: messages to and from its receiver
  std::uint32_t sequence = 0;
  CallSignature signature{};
  std::uint32_t length = 0;
  char text[1000] = {};

  void set_text(const std::string&);  ///< truncated to the size of `text`
  std::string get_text() const { return {text, length}; }
};

class ControlChannel {
 public:
  static constexpr int tag = 0;

  /// Control messages use `comm`, on which no other messages have this tag, including those that MPI itself
  /// may send for MPI_Comm_create_group.
  ControlChannel(MPI_Comm comm, int rank, int size) : comm_(comm), rank_(rank), size_(size) {}

  /// Non-blocking.
  void send(int peer, const ControlMessage&);
  void broadcast(const ControlMessage&);
  /// Calls `f` with every message that has arrived.
  void poll(const std::function<void(int peer, const ControlMessage&)>& f);
  /// Waits until MPI has sent all messages. False after `limit` or on an MPI error.
  bool flush(std::chrono::milliseconds limit) noexcept;
  /// Leaks messages that MPI has not sent yet, since MPI may still read them.
  void abandon();

 private:
  struct Outgoing {
    ControlMessage message;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  void reap_sent();

  MPI_Comm comm_;
  int rank_, size_;
  std::list<Outgoing> outgoing_;
};

}  // namespace rz::mpi
