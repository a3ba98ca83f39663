#pragma once
/// Runs one collective at a time by its schedule, as a dataflow machine over the byte streams of a transport.

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "comm/schedule/chunk_layout.h"
#include "comm/schedule/dependency_plan.h"
#include "comm/transport/transport.h"
#include "comm/transport/wait_state.h"

namespace rz {

/// Total bytes posted to each peer on a channel; Transport::released() counts against it.
using PostedBytes = std::vector<std::uint64_t>;

/// Slice: bytes reduced before dependent sends continue. Large enough to amortize, small enough to stay in
/// cache.
inline constexpr std::size_t default_slice_bytes = 64 << 10;

/// Reused from call to call; in the steady state it allocates nothing. Not thread safe: the progress engine's
/// driving thread calls all of it.
class ScheduleExecutor {
 public:
  ScheduleExecutor(Transport& transport, int rank, int size)
      : transport_(transport), rank_(rank), size_(size), posted_(static_cast<std::size_t>(size)) {}

  /// Begins a call; requires complete(). Call and plan must outlive it. `slice`: bytes, a multiple of 64.
  void start(const CollectiveCall&, const DependencyPlan&, const CallSignature&,
             std::size_t slice = default_slice_bytes);
  /// Moves data without blocking; true on any progress. Errc::mismatch if a peer made another call.
  bool advance();
  bool complete() const { return remaining_ == 0; }
  /// The peers that the call waits for. The suspect is first a peer that has sent nothing of the call, then
  /// one that has not sent all, then one that does not receive.
  WaitState waiting_on() const;

 private:
  struct Progress {
    std::size_t size = 0, done = 0;
    std::uint64_t stream_begin = 0;  // of a send
    bool finished = false;
  };
  // First bytes of an element that has not arrived completely.
  struct PartialElement {
    std::size_t have = 0;
    std::byte bytes[8];
  };
  struct Span {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    bool is_partial = false;
  };

  const std::byte* read(ChunkRef) const;
  std::byte* write(ChunkRef) const;
  std::size_t progress_of(int step) const;
  std::size_t available(int step) const;
  std::size_t posted_limit(int step) const;
  int divisor(const Step&) const;
  bool advance_send(int step);
  bool advance_local(int step);
  bool advance_receive(int step, int peer, std::size_t limit);
  bool advance_reduce(int step, std::size_t limit);
  Span received_span(int peer);
  void consume(int peer, const Span&, std::size_t bytes);
  enum class PeerWait { none, receiving, partial, everything };
  PeerWait wait_of(int peer) const;
  bool is_next_on_links(int step) const;
  bool matches(int peer);
  void finish(int step);

  Transport& transport_;
  const int rank_, size_;
  const CollectiveCall* op_ = nullptr;
  const DependencyPlan* plan_ = nullptr;
  std::optional<ChunkLayout> layout_;
  CallSignature signature_;
  DType dtype_ = DType::u8;
  std::size_t element_bytes_ = 1, scratch_chunk_bytes_ = 0, slice_ = default_slice_bytes;
  std::vector<Progress> progress_;
  std::vector<std::size_t> send_head_, receive_head_;  // positions in DependencyPlan::sends and receives
  std::vector<PartialElement> partial_;
  std::vector<bool> signature_checked_;  // the peer's signature was compared in this call
  std::size_t first_unfinished_ = 0, remaining_ = 0;
  std::shared_ptr<std::byte> scratch_;
  std::size_t scratch_bytes_ = 0;
  PostedBytes posted_;
  std::vector<const void*> sources_;
  std::vector<Span> spans_;
};

}  // namespace rz
