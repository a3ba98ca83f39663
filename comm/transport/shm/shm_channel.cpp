#include "comm/transport/shm/shm_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/core/integer_math.h"

namespace rz::shm {

namespace {

constexpr std::size_t max_reference_bytes = std::size_t{1} << 30;

}  // namespace

// ---- sending ----

bool Sender::has_free_frame() {
  if (posted_.frames - done_.frames < memory_.frame_count) return true;
  done_.frames = memory_.counters->frames_done.load(std::memory_order_acquire);
  return posted_.frames - done_.frames < memory_.frame_count;
}

/// Completes the frame at the front of the ring, whose payload or offset is written.
void Sender::publish(Frame& frame, const CallSignature& signature, std::size_t bytes,
                     std::uint32_t location) {
  frame.signature = signature;
  frame.length = static_cast<std::uint32_t>(bytes);
  frame.location = location;
  frame.ready.store(++posted_.frames, std::memory_order_seq_cst);
}

std::size_t Sender::post_by_reference(const CallSignature& signature, std::span<const std::byte> bytes,
                                      std::shared_ptr<Segment> segment) {
  reap_references();
  if (!has_free_frame()) return 0;
  const std::size_t taken = std::min(bytes.size(), max_reference_bytes);
  const std::uint32_t number = segment->number;
  Frame& frame = next_frame();
  frame.offset = static_cast<std::uint64_t>(bytes.data() - segment->memory.data());
  references_.push_back({accepted_, accepted_ + taken, std::move(segment)});
  accepted_ += taken;
  publish(frame, signature, taken, number);
  return taken;
}

/// Free bytes of the ring that are contiguous, at most a quarter of it.
std::uint64_t Sender::ring_room(std::size_t wanted) {
  const std::uint64_t size = memory_.ring_bytes, quarter = size / 4;
  if (posted_.ring - done_.ring + std::min<std::uint64_t>(wanted, quarter) > size)
    done_.ring = memory_.counters->ring_done.load(std::memory_order_acquire);
  return std::min({size - (posted_.ring - done_.ring), size - posted_.ring % size, quarter});
}

/// Copies in pieces of at most a quarter of the ring, so that the reader processes one while the next is
/// copied. Pieces end at multiples of a cache line from the start of the post, so no element is split.
std::size_t Sender::post_copy(const CallSignature& signature, std::span<const std::byte> bytes) {
  std::size_t taken = 0;
  while (taken < bytes.size() && has_free_frame()) {
    const auto rest = bytes.subspan(taken);
    Frame& frame = next_frame();
    std::size_t piece = rest.size();
    std::uint32_t location = in_frame;
    if (piece <= frame_inline_bytes) {
      std::memcpy(frame.payload, rest.data(), piece);
    } else {
      const std::uint64_t room = ring_room(piece), at = posted_.ring % memory_.ring_bytes;
      if (piece > room) piece = room / cache_line * cache_line;
      if (piece == 0) break;
      std::memcpy(memory_.ring + at, rest.data(), piece);
      location = in_ring;
      frame.offset = at;
      posted_.ring += round_up(piece, cache_line);
    }
    publish(frame, signature, piece, location);
    taken += piece;
  }
  accepted_ += taken;
  return taken;
}

void Sender::reap_references() {
  if (references_.empty()) return;
  const std::uint64_t consumed = memory_.counters->consumed.load(std::memory_order_acquire);
  while (!references_.empty() && references_.front().end <= consumed) references_.pop_front();
}

std::uint64_t Sender::released() {
  reap_references();
  if (references_.empty()) return accepted_;
  return std::max(references_.front().begin, memory_.counters->consumed.load(std::memory_order_acquire));
}

void Sender::keep_references_for_peer() {
  reap_references();
  for (auto& r : references_) r.segment->memory.keep_for_peers();
}

// ---- receiving ----

/// Address of the frame's bytes in this process; null if they are outside the mapped memory.
const std::byte* Receiver::resolve(const Frame& frame, SegmentSocket& segments) const {
  const auto within = [&](std::uint64_t size) {
    return frame.length <= size && frame.offset <= size - frame.length;
  };
  if (frame.location == in_frame) return frame.length <= frame_inline_bytes ? frame.payload : nullptr;
  if (frame.location == in_ring) return within(memory_.ring_bytes) ? memory_.ring + frame.offset : nullptr;
  const SharedMemory* segment = segments.find(frame.location);  // its descriptor was sent before the frame
  return segment && within(segment->size()) ? segment->data() + frame.offset : nullptr;
}

void Receiver::consume(std::size_t bytes) {
  if (bytes == 0) return;
  at_ += bytes, remaining_ -= bytes, consumed_ += bytes;
  if (remaining_ == 0) {
    const Frame& frame = memory_.frames[next_ % memory_.frame_count];
    if (frame.location == in_ring)
      memory_.counters->ring_done.store(ring_done_ += round_up(frame.length, cache_line),
                                        std::memory_order_release);
    at_ = nullptr;
    memory_.counters->frames_done.store(++next_, std::memory_order_release);
  }
  memory_.counters->consumed.store(consumed_, std::memory_order_seq_cst);
}

bool Receiver::changed() {
  seen_ = std::max(seen_, next_);
  bool any = false;
  while (seen_ - next_ < memory_.frame_count &&
         memory_.frames[seen_ % memory_.frame_count].ready.load(std::memory_order_seq_cst) == seen_ + 1)
    ++seen_, any = true;
  return any;
}

}  // namespace rz::shm
