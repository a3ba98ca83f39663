#include "tests/support/sim_transport.h"

namespace rz::test {

std::size_t SimTransport::post(int peer, Channel channel, const CallSignature& signature,
                               std::span<const std::byte> bytes) {
  return network_.stream(rank_, peer, channel).post(signature, bytes);
}

std::uint64_t SimTransport::released(int peer, Channel channel) {
  return network_.stream(rank_, peer, channel).released();
}

ReceiveView SimTransport::peek(int peer, Channel channel) {
  return network_.stream(peer, rank_, channel).peek();
}

void SimTransport::consume(int peer, Channel channel, std::size_t bytes) {
  network_.stream(peer, rank_, channel).consume(bytes);
}

void SimTransport::progress(std::uint32_t) {
  network_.deliver_abort();
  if (failure_) throw Error(failure_->code, failure_->reason, failure_->culprit);
}

void SimTransport::wait(std::chrono::microseconds timeout, bool) { network_.wait(rank_, timeout); }

void SimTransport::abort(const Failure& failure) noexcept { network_.request_abort(rank_, failure); }

void SimTransport::fail(const Failure& failure) {
  if (!failure_) failure_ = failure;
  wake();
}

void SimTransport::send_wait_message(int peer, const WaitMessage& message) {
  network_.send_control(rank_, peer, [&to = network_.transport(peer), from = rank_, message] {
    to.wait_graph_.receive(from, message);
  });
}

void SimTransport::query_waits() {
  wait_graph_.clear_replies();
  query_calls(wait_graph_.last_call().sequence, network_.size() - 1);
}

void SimTransport::query_calls(std::uint32_t number, int peers) {
  for (int i = 1; i <= peers; ++i)
    send_wait_message((rank_ + i) % network_.size(), {.kind = WaitMessage::query, .number = number});
}

void SimTransport::reply_waits(const WaitMessage& reply) {
  for (const auto& [peer, message] : wait_graph_.drain_replies(reply)) send_wait_message(peer, message);
}

}  // namespace rz::test
