#pragma once
/// Short notes between the ranks of a communicator beside its collectives: who is at which call, what went
/// wrong, who leaves. Driven by one thread at a time.

#include <mpi.h>

#include <chrono>
#include <functional>
#include <list>
#include <string>

#include "comm/transport/transport.h"

namespace rz::mpi {

struct ControlMessage {
  enum Kind : std::int32_t {
    query,     ///< are you at call `sequence`?
    reply,     ///< to that: the call of that number as this rank knows it, if `known`; it has made `calls` so
               ///< far
    failure,   ///< the group can go no further: code, culprit, text; its sender had ended its first `calls`
               ///< calls
    departure  ///< the last note of a rank, which has ended its first `calls` calls and destroys its
               ///< communicator
  };
  Kind kind = query;
  std::int32_t code = 0, culprit = -1, found = 0;
  std::uint64_t calls = 0;
  std::uint64_t sent = 0, received = 0;  ///< of leaving: messages to and from the receiver of the note
  std::uint32_t sequence = 0;
  CallSignature signature{};
  std::uint32_t length = 0;
  char text[1000] = {};

  void set_text(const std::string&);  ///< its beginning, if it is long
  std::string get_text() const { return {text, length}; }
};

class ControlChannel {
 public:
  static constexpr int tag = 0;

  /// Notes go as messages of `comm`, which has no others of that tag, those that MPI itself may send for
  /// MPI_Comm_create_group included.
  ControlChannel(MPI_Comm comm, int rank, int size) : comm_(comm), rank_(rank), size_(size) {}

  /// Never waits.
  void send(int peer, const ControlMessage&);
  void broadcast(const ControlMessage&);
  /// Hands every note that has arrived to `f`.
  void poll(const std::function<void(int peer, const ControlMessage&)>& f);
  /// Waits until MPI has taken every note, at most so long; false if it has not. Throws nothing.
  bool flush(std::chrono::milliseconds most) noexcept;
  /// What MPI has not taken stays in memory for ever.
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
