#pragma once
/// The transport of a group whose ranks are connected in several ways.

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/monitored_transport.h"

namespace rz {

/// Routes each peer to a transport. Its transports share the monitor. Functions without a comment implement
/// those of Transport.
class GroupTransport final : public MonitoredTransport {
 public:
  explicit GroupTransport(std::shared_ptr<LinkMonitor> monitor)
      : MonitoredTransport(std::move(monitor)), by_rank_(nodes().size()) {}
  /// Adds a transport that serves these peers.
  void add(std::unique_ptr<MonitoredTransport>, std::span<const int> peers);

  /// The addresses of all transports, separated by spaces.
  std::string address() const override;
  void connect(const net::HandshakeInfo&, const std::vector<std::string>& addresses, Deadline) override;

  std::size_t post(int peer, Channel channel, const CallSignature& signature,
                   std::span<const std::byte> bytes) override {
    return to(peer).post(peer, channel, signature, bytes);
  }
  std::uint64_t released(int peer, Channel channel) override { return to(peer).released(peer, channel); }
  ReceiveView peek(int peer, Channel channel) override { return to(peer).peek(peer, channel); }
  void consume(int peer, Channel channel, std::size_t bytes) override {
    to(peer).consume(peer, channel, bytes);
  }
  std::size_t receive(int peer, Channel channel, std::span<std::byte> into) override {
    return to(peer).receive(peer, channel, into);
  }

  /// That of the transport that has one.
  SharedMemoryGroup* shared_memory() override;
  std::string describe() const override;

 private:
  Transport& to(int peer) { return *by_rank_[static_cast<std::size_t>(peer)]; }

  std::vector<std::unique_ptr<MonitoredTransport>> transports_;
  std::vector<Transport*> by_rank_;  // null: this rank
};

}  // namespace rz
