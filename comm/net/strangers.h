#pragma once
/// Connections that have not proved yet that they are of this job: how fast they are accepted, which of them
/// is dropped if there are too many, and the count of those that were refused.

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "comm/net/authentication.h"
#include "comm/net/socket.h"

namespace rz::net {

/// The host that a connection comes from: equal for all connections of it (of IPv6: of one network of 64
/// bits).
using Source = std::array<std::uint8_t, 8>;
Source source_of(const SocketAddress&);

/// Accepts a connection; `from` becomes the address of its other end. Empty, with errno, if there is none.
UniqueFd accept_connection(int listener, SocketAddress& from);

struct Unproven {
  Source source{};
  bool has_hello = false;  ///< it has sent a valid hello
};
/// The position, among connections in the order of their arrival, of the one to drop if there are too many.
/// If hosts have more than `expected`, the number that ranks may have, one of the host that has most; else
/// any. Of these the oldest, with a hello or without one, whichever are more. So a host that opens many
/// connections displaces its own; of other hosts, a connection goes only once half of all have come after it.
std::size_t choose_dropped(std::span<const Unproven>, std::size_t expected);

/// Limits how fast a listener accepts connections that prove nothing. Those beyond it wait in the kernel's
/// queue, and none is refused. A connection that proves the secret takes nothing of the limit, so ranks alone
/// are never delayed, however many connect at once.
class AcceptRate {
 public:
  using Time = Deadline::Clock::time_point;
  /// While ranks are missing, so that one waits 32 ms at most behind a full queue of 1,024; and afterwards,
  /// when the processors are for the job: 2,000 take a few percent of one.
  static constexpr double while_starting = 32'000, while_running = 2'000;

  /// `at_once`: connections without a proof that are accepted before the rate applies.
  explicit AcceptRate(std::size_t at_once) : at_once_(static_cast<double>(at_once)), left_(at_once_) {}

  void accepted() { left_ -= 1; }
  void proven();
  /// How long the listener has to rest until a batch (max_accepts_per_poll) may be accepted; mostly zero.
  Deadline::Clock::duration rest(double per_second, Time now = Deadline::Clock::now());

 private:
  const double at_once_;
  double left_;
  Time counted_{};
};

class Strangers {
 public:
  /// Counts a connection that ended without a proof, and notes one that proved the secret but not encryption.
  /// `from`: as accepted, since a socket whose other end has reset it has no peer any more.
  void count(const SocketAddress& from, const Authentication&) noexcept;
  std::uint64_t refused() const { return refused_; }
  /// "3 connections that did not prove …; 1 connection of another user …", or empty if there were none.
  std::string sentence() const;
  /// For the end of a message: "; rank 3 proved the secret of this job, but …; 3 connections …", or empty.
  std::string text() const;
  /// Whether one of them names itself a member of this group, or is one, and will not be let in as it is.
  bool has_member() const {
    return !with_other_secret_.empty() || !other_member_.empty() || has_other_user();
  }
  bool has_other_user() const { return of_other_users_ > 0; }
  /// Whether one of them was none of another group that searches its own store.
  bool unknown() const { return refused_ > of_other_groups_; }

 private:
  std::uint64_t refused_ = 0, of_other_groups_ = 0, of_other_users_ = 0;
  std::string last_;               ///< the address of the last one
  std::string with_other_secret_;  ///< the last one of this group's members with another secret
  std::string of_other_user_;      ///< the last one of this group's members of another user
  std::string other_member_;       ///< the last one that proved the secret: its name, and what failed
};

}  // namespace rz::net
