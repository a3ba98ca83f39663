#include "tests/support/sim_stream.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz::test {

std::size_t SimStream::post(const CallSignature& signature, std::span<const std::byte> bytes) {
  const std::size_t max = std::min(bytes.size(), jitter_.max_unread_bytes - unacknowledged_);
  if (max == 0 || refuses()) return 0;
  const std::size_t accepted = random_.below(2) ? max : 1 + random_.below(max);
  unacknowledged_ += accepted;
  for (std::size_t done = 0; done < accepted;) {
    const std::size_t n = std::min(accepted - done, 1 + random_.below(jitter_.max_piece_bytes));
    send(signature, bytes.subspan(done, n));
    done += n;
  }
  return accepted;
}

/// At random, the stream refuses for a while. An event ends it, so that the sender posts again.
bool SimStream::refuses() {
  if (!busy_ && random_.below(8) == 0) {
    busy_ = true;
    clock_.schedule(delay(), from_, [this] { busy_ = false; });
  }
  return busy_;
}

void SimStream::send(const CallSignature& signature, std::span<const std::byte> bytes) {
  auto piece = std::make_shared<Piece>(Piece{signature, bytes, {}, random_.below(2) == 0});
  unreleased_.push_back(piece);
  wire_.busy_until =
      std::max(wire_.busy_until, clock_.now()) + SimTime(bytes.size() * 1000 / wire_.link.bytes_per_us);
  last_arrival_ = std::max(last_arrival_, wire_.busy_until + wire_.link.latency + delay());
  clock_.schedule(last_arrival_ - clock_.now(), to_, [this, piece] { arrive(piece); });
}

void SimStream::arrive(const std::shared_ptr<Piece>& piece) {
  if (lost()) return;
  piece->bytes.assign(piece->source.begin(), piece->source.end());
  unread_.push_back(piece);
  if (!piece->held_until_consumed) clock_.schedule(delay(), from_, [this, piece] { release(piece); });
}

ReceiveView SimStream::peek() const {
  if (unread_.empty()) return {};
  const Piece& front = *unread_.front();
  return {front.signature, std::span(front.bytes).subspan(front_consumed_)};
}

void SimStream::consume(std::size_t bytes) {
  require(bytes <= peek().bytes.size(), Errc::invalid_argument, "consume(", bytes,
          ") of more than peek() showed from rank ", from_);
  if (bytes == 0) return;
  front_consumed_ += bytes;
  const auto piece = unread_.front();
  if (front_consumed_ < piece->bytes.size()) return;
  front_consumed_ = 0;
  unread_.pop_front();
  clock_.schedule(wire_.link.latency + delay(), from_, [this, piece] { acknowledge(piece); });
}

void SimStream::acknowledge(const std::shared_ptr<Piece>& piece) {
  if (lost()) return;
  unacknowledged_ -= piece->bytes.size();
  release(piece);
}

/// Memory is released in the order of the stream.
void SimStream::release(const std::shared_ptr<Piece>& piece) {
  if (lost()) return;
  piece->releasable = true;
  for (; !unreleased_.empty() && unreleased_.front()->releasable; unreleased_.pop_front()) {
    const Piece& front = *unreleased_.front();
    require(std::equal(front.bytes.begin(), front.bytes.end(), front.source.begin()), Errc::invalid_argument,
            "rank ", from_, " changed memory that it had posted to rank ", to_, " before it was released");
    released_ += front.bytes.size();
  }
}

}  // namespace rz::test
