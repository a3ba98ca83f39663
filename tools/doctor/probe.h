#pragma once
/// Measures the way between two hosts, by TCP as the transport uses it, and by UDP packets that must not be
/// fragmented. The server listens on one address and serves one client, which has its token.

#include <string>

#include "comm/core/deadline.h"
#include "comm/net/socket.h"
#include "comm/os/fd.h"
#include "tools/doctor/checks.h"

namespace rz::doctor {

class ProbeServer {
 public:
  /// Listens on a free port of this address. Errc::system if it is none of this host, Errc::rendezvous if it
  /// is no address.
  /// `stop`: a descriptor, borrowed, whose input or end stops the server; -1: none.
  explicit ProbeServer(const std::string& address, int stop = -1);
  int port() const { return net::local_address(listener_.get()).port(); }
  /// Serves the first client that sends the token (net::random_hex()), until it closes the connection. Others
  /// are dropped. Returns at the deadline at the latest.
  void serve(const std::string& token, Deadline);

 private:
  UniqueFd accept_client(const std::string& token, Deadline) const;
  void serve_client(int client, const std::string& token, Deadline) const;
  UniqueFd listener_, packets_;
  int stop_;
};

/// Measures as a client of such a server. Never throws: PairMeasurement::error has the reason, and what was
/// measured before. Ends a second after the deadline at the latest.
PairMeasurement measure(const std::string& address, int port, const std::string& token, Deadline);

}  // namespace rz::doctor
