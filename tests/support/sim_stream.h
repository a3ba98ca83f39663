#pragma once
/// One stream of a simulated network: from one rank to another, on one channel.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "comm/transport/transport.h"
#include "tests/support/sim_clock.h"
#include "tests/support/sim_random.h"

namespace rz::test {

/// The properties of one direction between two ranks.
struct SimLink {
  SimTime latency{1'000};
  std::uint64_t bytes_per_us = 10'000;
};

/// What the seed varies.
struct SimJitter {
  /// Upper bound of a random delay, which is added to the latency of every piece, acknowledgement and control
  /// message, and to the start of every rank.
  SimTime max_delay{20'000};
  /// Posted bytes are cut into pieces of random lengths up to this.
  std::size_t max_piece_bytes = 2048;
  /// Bytes of one stream that are accepted and not yet acknowledged as consumed.
  std::size_t max_unread_bytes = 16 << 10;
};

/// One direction between two ranks. Its channels share the bandwidth.
struct SimWire {
  SimLink link;
  SimTime busy_until{};
  bool down = false;  ///< all that has not arrived is lost
};

/// Pieces arrive in order. A piece is read from the sender's memory when it arrives, and released later: some
/// pieces after a random delay, the others once they are consumed. If the sender has changed the memory
/// before it is released, the event of the release throws Errc::invalid_argument.
class SimStream {
 public:
  /// The references outlive the stream.
  SimStream(int from, int to, SimWire& wire, SimClock& clock, SimRandom& random, const SimJitter& jitter)
      : from_(from), to_(to), wire_(wire), clock_(clock), random_(random), jitter_(jitter) {}

  // As the functions of Transport.
  std::size_t post(const CallSignature&, std::span<const std::byte>);
  std::uint64_t released() const { return released_; }
  ReceiveView peek() const;
  void consume(std::size_t bytes);

  /// The sender's memory may be gone from now on: pieces that have not arrived are lost.
  void close() { closed_ = true; }

 private:
  struct Piece {
    CallSignature signature;
    std::span<const std::byte> source;  // the sender's memory
    std::vector<std::byte> bytes;       // since the arrival
    bool held_until_consumed, releasable = false;
  };

  bool refuses();
  void send(const CallSignature&, std::span<const std::byte>);
  void arrive(const std::shared_ptr<Piece>&);
  void acknowledge(const std::shared_ptr<Piece>&);
  void release(const std::shared_ptr<Piece>&);
  bool lost() const { return wire_.down || closed_; }
  SimTime delay() { return random_.delay(jitter_.max_delay); }

  const int from_, to_;
  SimWire& wire_;
  SimClock& clock_;
  SimRandom& random_;
  const SimJitter& jitter_;
  std::deque<std::shared_ptr<Piece>> unread_, unreleased_;
  std::size_t front_consumed_ = 0;  // of the first unread piece
  std::size_t unacknowledged_ = 0;
  std::uint64_t released_ = 0;
  SimTime last_arrival_{};
  bool busy_ = false;  // it refuses until an event
  bool closed_ = false;
};

}  // namespace rz::test
