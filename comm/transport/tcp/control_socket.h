#pragma once
/// The control socket of two ranks: departure notices, failures and wait-for messages, which never wait for
/// data.

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "comm/net/poller.h"
#include "comm/net/stream.h"
#include "comm/transport/failure.h"
#include "comm/transport/wait_for_graph.h"

namespace rz::tcp {

constexpr std::uint32_t control_magic = 0x33435a52;  // "RZC3"

struct ControlFrame {
  enum Kind : std::uint32_t {
    departure = 1,
    failure = 2,
    wait_query = 3,
    wait_reply = 4,
    wait_idle = 5,
    wait_elsewhere = 6,
    beat = 7
  };
  std::uint32_t magic = control_magic;
  std::uint32_t kind = departure;
  std::int32_t culprit = -1;
  std::uint32_t code = 0;
  std::uint32_t calls = 0;  ///< Failure::calls
  std::uint32_t unused = 0;
  char reason[496] = {};  ///< of a failure; a query has its number here, a reply what WaitReply has
};

/// What a reply to a query holds, without padding.
struct WaitReply {
  RankSet waits_for;
  CallSignature call, numbered;
  std::uint64_t has_numbered;
};
static_assert(sizeof(ControlFrame) == 520 && sizeof(WaitReply) <= sizeof(ControlFrame::reason));

/// One thread at a time calls a function that is not marked "any thread". Nothing blocks. Does not
/// move while the poller watches it.
class ControlSocket {
 public:
  /// `max_silence`: a host that acknowledges no control data for this long is lost.
  void open(net::Stream, net::Poller&, std::chrono::milliseconds max_silence);
  /// Sends a departure notice and ends the stream.
  void close(net::Poller&);

  /// Reads the frames that have arrived since the poller has flagged the socket: stores wait-for messages of
  /// `peer` in the graph. Returns a failure that the peer reports.
  std::optional<Failure> read(int peer, WaitForGraph&);
  /// The peer has sent a departure notice.
  bool departed() const { return departed_; }  // any thread
  /// The stream has ended, or is damaged.
  bool closed() const { return closed_; }
  /// Heartbeats that have arrived. Any thread.
  std::uint64_t beats() const { return beats_; }
  /// The fewest Failure::calls of its failures that were Errc::cancelled; empty if there was none.
  std::optional<std::uint32_t> cancelled_after() const { return cancelled_after_; }
  /// Why encryption has failed; empty if it has not.
  std::string error() const { return stream_.error(); }
  /// The errno with which sending or reading has failed first; 0 if the peer has ended it.
  int error_number() const { return error_number_; }

  /// Any thread.
  void send_failure(const Failure&) noexcept;
  /// Drops the message if the socket is full.
  void send_wait_message(const WaitMessage&) noexcept;
  /// The same. Any thread.
  void send_beat() noexcept;
  /// Continues sending a failure. Any thread.
  void flush() noexcept;

 private:
  void send(const ControlFrame&, bool last_word) noexcept;
  void flush_locked() noexcept;
  void note_error() noexcept;
  bool receive(ControlFrame&);
  ssize_t receive_some();
  void store(int peer, const ControlFrame&, WaitForGraph&);

  net::Stream stream_;  // of an encrypted one, both directions are used under mutex_
  net::FdEvents fd_events_;
  // Sending.
  std::mutex mutex_;
  std::array<std::byte, 2 * sizeof(ControlFrame)> unsent_;  // the rest of a frame, then at most one last word
  std::atomic<std::size_t> unsent_bytes_{0};                // written under mutex_
  std::atomic<bool> unsent_records_{false};                 // of the stream; likewise
  // Receiving.
  std::array<std::byte, sizeof(ControlFrame)> partial_;  // the received part of a frame
  std::size_t partial_bytes_ = 0;
  std::atomic<bool> departed_{false};
  bool closed_ = false;
  std::atomic<std::uint64_t> beats_{0};
  std::optional<std::uint32_t> cancelled_after_;
  std::atomic<int> error_number_{0};
};

}  // namespace rz::tcp
