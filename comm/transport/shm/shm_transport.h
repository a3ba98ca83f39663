#pragma once
/// Shared-memory transport, between the ranks of one node.
///
/// Every rank owns a memfd that holds its incoming channels, one per peer and Channel, and its mailbox with
/// the staging ring (shm_layout.h). A unix socket per pair of ranks carries the descriptors of segments. It
/// hangs up when the peer's process dies.

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/handshake.h"
#include "comm/os/process.h"
#include "comm/transport/monitored_transport.h"
#include "comm/transport/shared_memory_group.h"
#include "comm/transport/shm/shm_channel.h"

namespace rz {

/// Functions without a comment implement those of Transport for the peers, and those of MonitoredLinks.
class ShmTransport final : public MonitoredTransport, private MonitoredLinks {
 public:
  /// `ranks`: the ranks of this node, this one included, ascending. `ring_bytes`, `memory`: see
  /// SharedMemoryGroup.
  ShmTransport(std::shared_ptr<LinkMonitor>, std::vector<int> ranks, std::size_t ring_bytes,
               std::shared_ptr<SharedMemoryAllocator> memory = nullptr);
  /// Descriptors that a rank with this many peers on its node needs.
  static std::size_t files_for(std::size_t peers);
  /// Departs in order: posted data stays readable, data posted by reference included. In a child of fork() it
  /// only closes descriptors.
  ~ShmTransport();

  /// An unguessable name in the abstract unix namespace.
  std::string address() const override { return address_; }
  void connect(const net::HandshakeInfo&, const std::vector<std::string>& addresses, Deadline) override;

  std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>) override;
  std::uint64_t released(int peer, Channel) override;
  ReceiveView peek(int peer, Channel) override;
  void consume(int peer, Channel, std::size_t bytes) override;

  SharedMemoryGroup* shared_memory() override { return group_.get(); }
  std::string describe() const override { return "shm"; }

 private:
  /// The streams to and from a peer.
  struct Streams {
    Streams(SharedMemoryGroup&, ShmPeer&);
    ShmPeer& peer;
    std::array<shm::Sender, channel_count> out;
    std::array<shm::Receiver, channel_count> in;
  };

  bool changed() override;
  void set_sleeping(bool) override;
  std::optional<Failure> poll_failures() override;
  std::optional<Failure> group_failure() const override;
  Failure spread_failure(const Failure&) override;
  void beat() noexcept override { group_->beat(); }
  void add_pulses(std::vector<Pulse>&) const override;
  std::optional<Failure> judge_silence(const Pulse&, std::chrono::duration<double>) const override;
  std::optional<std::uint32_t> cancelled_after() const override {
    return group_->election().cancelled_after();
  }
  void send_wait_message(int peer, const WaitMessage&) override;

  Streams& streams_of(int peer) { return *by_rank_[static_cast<std::size_t>(peer)]; }
  void report_missing(const ShmPeer&, const shm::Receiver&);

  const Creator creator_;
  const std::vector<int> ranks_;
  std::string address_;
  UniqueFd listener_;
  std::unique_ptr<SharedMemoryGroup> group_;  // null without peers
  std::vector<std::unique_ptr<Streams>> streams_;
  std::vector<Streams*> by_rank_;  // null: on another node
};

}  // namespace rz
