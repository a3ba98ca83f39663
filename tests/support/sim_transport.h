#pragma once
/// The transport of one rank of a simulated network.

#include <atomic>

#include "tests/support/sim_network.h"

namespace rz::test {

/// Functions without a comment implement those of Transport. The time of wait() is virtual.
class SimTransport final : public Transport {
 public:
  SimTransport(SimNetwork& network, int rank) : network_(network), rank_(rank), wait_graph_(rank) {}

  std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>) override;
  std::uint64_t released(int peer, Channel) override;
  ReceiveView peek(int peer, Channel) override;
  void consume(int peer, Channel, std::size_t bytes) override;
  void progress(std::uint32_t) override;
  void wait(std::chrono::microseconds timeout, bool eager) override;
  void wake() noexcept override { woken_ = true; }
  void abort(const Failure&) noexcept override;
  void query_waits() override;
  void query_calls(std::uint32_t number, int peers) override;
  void reply_waits(const WaitMessage& reply) override;
  void record_call(const CallSignature& call) override { wait_graph_.record(call); }
  const WaitForGraph& wait_graph() const override { return wait_graph_; }
  std::span<const int> nodes() const override { return network_.node_of_rank(); }
  std::string describe() const override { return "sim"; }

  /// From now on progress() throws this failure, or the one that was passed first.
  void fail(const Failure&);
  /// Whether something may have changed since the last call.
  bool clear_wake() { return woken_.exchange(false); }

 private:
  void send_wait_message(int peer, const WaitMessage&);

  SimNetwork& network_;
  const int rank_;
  WaitForGraph wait_graph_;
  std::optional<Failure> failure_;
  std::atomic<bool> woken_{false};
};

}  // namespace rz::test
