#pragma once
/// Byte stream between two ranks of a node on one channel: a ring of cache-line frames and a ring of bytes,
/// with one writer, one reader and no lock. A frame's bytes lie in the frame itself (up to 24), in the ring
/// of bytes (copied), or in a segment of the sender (by reference, zero-copy).

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>

#include "comm/shared_memory/allocator.h"
#include "comm/transport/segment_socket.h"
#include "comm/transport/shm_layout.h"
#include "comm/transport/transport.h"

namespace rz::shm {

/// The writer's end. Functions without a comment implement those of Transport.
class Sender {
 public:
  explicit Sender(const ChannelMemory& memory) : memory_(memory) {}

  /// Copies shorter data: that takes less time than the release of a reference.
  bool prefers_reference(std::size_t bytes) const { return bytes >= memory_.ring_bytes / 2; }
  std::size_t post_copy(const CallSignature&, std::span<const std::byte>);
  /// `bytes` lie in the segment, which the peer has mapped or will map when it reads the frame.
  std::size_t post_by_reference(const CallSignature&, std::span<const std::byte> bytes,
                                std::shared_ptr<Segment>);
  std::uint64_t released();
  /// The peer has not consumed all that was posted by reference, as of the last released().
  bool has_references() const { return !references_.empty(); }
  /// True if the peer has consumed bytes since the last call.
  bool changed() {
    const auto consumed = memory_.counters->consumed.load(std::memory_order_seq_cst);
    return consumed != std::exchange(seen_, consumed);
  }
  /// Keeps the contents of posted segments for the peer, after this rank has departed.
  void keep_references_for_peer();

 private:
  struct Reference {
    std::uint64_t begin, end;  ///< positions in the stream
    std::shared_ptr<Segment> segment;
  };
  /// Frames and bytes of the ring: posted, and done by the reader as last read from the counters.
  struct Positions {
    std::uint64_t frames = 0, ring = 0;
  };

  bool has_free_frame();
  std::uint64_t ring_room(std::size_t wanted);
  Frame& next_frame() { return memory_.frames[posted_.frames % memory_.frame_count]; }
  void publish(Frame&, const CallSignature&, std::size_t bytes, std::uint32_t location);
  void reap_references();

  const ChannelMemory memory_;
  Positions posted_, done_;
  std::uint64_t accepted_ = 0;
  std::uint64_t seen_ = 0;            // bytes consumed, as last read by changed()
  std::deque<Reference> references_;  // not yet consumed
};

/// The reader's end. Functions without a comment implement those of Transport.
class Receiver {
 public:
  explicit Receiver(const ChannelMemory& memory) : memory_(memory) {}

  /// `segments`: finds the segments of the sender.
  ReceiveView peek(SegmentSocket& segments);
  /// The front frame if its bytes are outside the mapped memory: peek() does not show them. Else null.
  const Frame* damaged() const { return damaged_; }
  void consume(std::size_t bytes);
  /// Bytes that peek() has shown and consume() has not removed.
  std::size_t shown() const { return remaining_; }
  /// True if frames have arrived since the last call.
  bool changed();

 private:
  const std::byte* resolve(const Frame&, SegmentSocket&) const;

  const ChannelMemory memory_;
  std::uint64_t next_ = 0;  // number of the front frame
  std::uint64_t seen_ = 0;  // frames that have arrived, as last read by changed()
  std::uint64_t consumed_ = 0, ring_done_ = 0;
  const std::byte* at_ = nullptr;  // the rest of the front frame; null before it is resolved
  std::size_t remaining_ = 0;
  const Frame* damaged_ = nullptr;
};

// Inline: a step of a schedule that waits polls it.
inline ReceiveView Receiver::peek(SegmentSocket& segments) {
  const Frame& frame = memory_.frames[next_ % memory_.frame_count];
  if (!at_) {
    if (frame.ready.load(std::memory_order_acquire) != next_ + 1) return {};
    at_ = resolve(frame, segments);
    if (!at_) return damaged_ = &frame, ReceiveView{};
    remaining_ = frame.length;
  }
  return {frame.signature, {at_, remaining_}};
}

}  // namespace rz::shm
