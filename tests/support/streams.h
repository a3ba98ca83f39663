#pragma once
/// Traffic for transports: every rank sends every other a stream of messages of random sizes on both
/// channels, and checks each received byte and signature.

#include <cstdint>

#include "comm/core/error.h"
#include "comm/transport/group/connect_transport.h"

namespace rz::test {

struct Traffic {
  int messages = 40;                ///< for each peer and channel
  std::size_t max_bytes = 300'000;  ///< bytes
  std::uint32_t seed = 1;
};

/// Returns when this rank has sent and received everything, and all its memory was released. Failed
/// expectations name peer, channel and offset.
void exchange_streams(Transport&, int rank, int size, const Traffic& = {});

/// How ranks are connected: GroupSettings, TransportOptions and host id.
struct ConnectOptions {
  std::string transport = "auto", interface;
  int sockets = 2;
  std::string host_id;
  std::string algorithm;
  std::string congestion = "system";
  std::string encryption = "on";
  GroupSettings group() const {
    return {.transport = transport, .sockets = sockets, .encryption = encryption, .algorithm = algorithm};
  }
};

/// exchange_peer_info() and connect_transport().
std::unique_ptr<Transport> connect(int rank, int size, Store&, const ConnectOptions& = {},
                                   Deadline = Deadline::after(std::chrono::seconds(60)));

/// Makes progress until `done()`; fails the test after `seconds`.
template <class F>
void drive(Transport& transport, const F& done, double seconds = 20) {
  const auto deadline = Deadline::after(std::chrono::microseconds(static_cast<long>(seconds * 1e6)));
  while (!done()) {
    require(!deadline.expired(), Errc::timeout, "the transport did not get there in time");
    transport.progress(0);
    transport.wait(std::chrono::milliseconds(5));
  }
}

/// Posts all of it; makes progress meanwhile.
void post_all(Transport&, int peer, Channel, const CallSignature&, std::span<const std::byte>);
/// Receives exactly that many.
void receive_all(Transport&, int peer, Channel, std::span<std::byte>);

/// Every rank has reached this point: a byte to and from every other on the point_to_point channel.
void sync_all(Transport&, int rank, int size);

}  // namespace rz::test
