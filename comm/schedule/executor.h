#pragma once
/// One collective on its way: a dataflow machine over the byte streams of a transport.

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/schedule/chunk_layout.h"
#include "comm/schedule/dependency_plan.h"
#include "comm/transport/transport.h"

namespace rz {

/// Bytes that were ever posted to each peer in a lane, against which Transport::released counts.
using PostedBytes = std::vector<std::uint64_t>;

/// What is combined before dependent sends get their turn: large enough to amortise, small enough to stay in
/// cache.
inline constexpr std::size_t default_slice_bytes = 64 << 10;

/// Reused from call to call: in the steady state nothing is allocated.
class ScheduleExecutor {
 public:
  ScheduleExecutor(Transport& transport, int rank, int size)
      : transport_(transport), rank_(rank), size_(size), posted_(static_cast<std::size_t>(size)) {}

  /// Begins a call. Operation and plan must outlive it. It goes by `slice` bytes, a multiple of 64.
  void start(const CollectiveCall&, const DependencyPlan&, const CallSignature&,
             std::size_t slice = default_slice_bytes);
  /// Moves what can be moved; true if anything was. Errc::mismatch if a peer is in another call.
  bool advance();
  bool complete() const { return remaining_ == 0; }
  /// The peers that the call waits for.
  RankSet debtors() const;
  /// They, for messages: "rank 2 to send, rank 3 to receive".
  std::string waiting_for() const;
  /// The one of them that owes most: that has sent nothing of the call, or not all, or takes nothing; or -1.
  int culprit() const;

 private:
  struct Progress {
    std::size_t size = 0, done = 0;
    std::uint64_t stream_begin = 0;  // of a send
    bool finished = false;
  };
  // A peer's bytes that end within an element wait here for the rest of it.
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
  bool advance_receive(int step, int peer, std::size_t most);
  bool advance_reduce(int step, std::size_t most);
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
  std::size_t element_bytes_ = 1, scratch_chunk_bytes_ = 0, slice_ = default_slice_bytes;
  std::vector<Progress> progress_;
  std::vector<std::size_t> send_head_, receive_head_;  // positions in Plan::sends and receives
  std::vector<PartialElement> partial_;
  std::vector<bool> signature_checked_;  // the peer's signature was compared in this call
  std::size_t first_unfinished_ = 0, remaining_ = 0;
  std::shared_ptr<std::byte> scratch_;
  std::size_t scratch_bytes_ = 0;
  PostedBytes posted_;
  std::vector<const void*> sources_;
  std::vector<Span> spans_;
};

/// What every rank must pass alike.
CallSignature make_signature(const CollectiveCall&, int size, std::uint32_t sequence,
                             std::uint32_t algorithm = 0);
/// "all_reduce #17 (1024 f32, sum)": what a signature says, for messages.
std::string describe(const CallSignature&);

}  // namespace rz
