#pragma once
/// Connections that have not proved yet that they are of this job: which of them is dropped if there are too
/// many, and the count of those that were refused.

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "comm/net/authentication.h"
#include "comm/net/socket.h"

namespace rz::net {

/// Where a connection comes from: equal for all connections of one host (of IPv6: of one network of 64 bits).
using Source = std::array<std::uint8_t, 8>;
Source source_of(const SocketAddress&);

/// Accepts a connection; `source` tells where it comes from. Empty, with errno, if there is none.
UniqueFd accept_connection(int listener, Source& source);

struct Unproven {
  Source source{};
  bool has_hello = false;  ///< it has sent a valid hello
};
/// The position, among connections in the order of their arrival, of the one to drop if there are too many:
/// of those without a hello if there are some, of the host that has the largest number of them, the oldest.
/// So a host that opens many connections displaces its own.
std::size_t choose_dropped(std::span<const Unproven>);

class Strangers {
 public:
  /// Counts a connection that ended without a proof.
  void count(int socket, const Authentication&) noexcept;
  std::uint64_t refused() const { return refused_; }
  /// For the end of a message: "; 3 connections that did not prove …", or empty if there were none.
  std::string text() const;

 private:
  std::uint64_t refused_ = 0;
  std::string last_;               ///< the address of the last one
  std::string with_other_secret_;  ///< the last one of this group's members with another secret
};

}  // namespace rz::net
