#pragma once
/// Collectives among ranks of one host, without frames or streams: what comm/schedule/executor.h does for
/// any transport, by letters in the ranks' meeting places (comm/intranode/mailbox_channel.h).
///
/// A call is a row of steps, the same on every rank. At each step a rank offers something: bytes in the
/// letter itself, in its ring, or its own memory from allocate(). Who needs it reads it where it lies and
/// says so. Sums are folded in rank order, so that they have the bits of every schedule that sums so.
///
/// One-shot: everybody reads everything. Two-shot: rank r folds part r, and a second row of steps gathers the
/// parts. Direct: rank r folds part r out of all ranks' memory and writes it into all ranks' memory; nobody's
/// call is complete before all have done so. After a failure such a peer may still write there for a while.
/// Once: what only moves is copied out of the owner's process by the kernel, if that is the faster way.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/intranode/buffer_handles.h"
#include "comm/intranode/mailbox_channel.h"
#include "comm/intranode/zero_copy_backoff.h"
#include "comm/reduce/reduce.h"
#include "comm/tuning/intranode.h"

namespace rz {

class IntranodeEngine {
 public:
  /// Of a transport that has a meeting(). `first_step`: see Letters.
  IntranodeEngine(Transport&, int rank, int size, std::uint32_t first_step = 0);
  IntranodeEngine(Transport&, int rank, int size, IntranodeTuningTable, std::uint32_t first_step = 0);

  /// Begins the call of that number. The operation must outlive it, or move().
  void start(const CollectiveCall&, std::uint32_t sequence);
  /// Bytes of the whole of a call that is tried at once.
  static constexpr std::size_t max_inline_bytes = 256 << 10;

  /// Whether the call is like the last one, of that many bytes at most.
  bool matches_last(const CallKey& call) const {
    return call.key == key_ && call.count == channel_.call().count;
  }
  /// start() and spin() of such a call: the shortest way.
  bool run_fast_path(const CallKey&, std::uint32_t sequence, int turns);
  const CollectiveCall& call() const { return *op_; }
  /// The operation lies elsewhere now.
  void rebind(const CollectiveCall& op) { op_ = &op; }
  /// Moves what can be moved; true if anything was. Errc::mismatch if a peer is in another call.
  bool advance();
  /// advance() until the call is complete or `turns` turns went by, on a crowded host half a millisecond at
  /// most, and then claim(). True: complete. A large call is moved in parts of some max_spin_bytes bytes,
  /// between which its caller looks at failures and deadlines.
  bool spin(int turns);
  static constexpr std::size_t max_spin_bytes = 8 << 20;
  /// The last spin() ended after such a part: there is more to move at once.
  bool busy() const { return busy_; }
  bool complete() const { return complete_; }
  /// It does not go on without some peer: a failure, if that one has left.
  void check_peer_alive() { channel_.check_peer_alive(); }

  /// The schedule that serves the call instead, over streams; null: none does. start() is for the others.
  const IntranodeAlgorithm* schedule_for(const CollectiveCall& op) const {
    return table_.has_schedule(op.kind) ? find_schedule(op) : nullptr;
  }
  /// Any thread.
  const IntranodeTuningTable& table() const { return table_; }
  StagingLimits limits() const {
    return {std::min(channel_.staging_bytes(),
                     oversubscribed_ ? max_staging_window_oversubscribed : max_staging_window),
            oversubscribed_};
  }

  RankSet debtors() const;
  std::string waiting_for() const;
  int culprit() const;

 private:
  enum class Protocol { one_shot, two_shot, zero_copy, single_copy };
  // What a plan depends on; calls mostly are like the last one.
  struct CallShape {
    std::size_t in, out;
    std::uint64_t key;
    bool operator==(const CallShape&) const = default;
  };

  // How a call is cut: into parts, if each of a rank's peers reads its own, and into rounds.
  struct CallChunks {
    Protocol protocol = Protocol::one_shot;
    bool per_peer = false;
    std::size_t shard_bytes = 0, chunk_bytes = 0, chunks = 0;  // bytes of a part, and of it in a round
  };

  static constexpr std::size_t block_bytes =
      8 << 10;  // of several passes over the same bytes, in the first cache
  // Bytes of the ring that pieces of a call are cut for, and that large exchanges take turns in.
  static constexpr std::size_t max_staging_window = 768 << 10, max_staging_window_oversubscribed = 256 << 10;

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  // together.cpp: what a call comes to
  static CallShape shape_of(const CollectiveCall&);
  const IntranodeAlgorithm* find_schedule(const CollectiveCall&) const;
  void plan();
  std::uint64_t key_of_plan() const;
  void choose_peers();
  bool is_sender(int rank) const;
  bool reads_from(int peer) const { return peer >= first_sender_ && peer < last_sender_; }
  bool waits_for(int peer) const;
  void set_staging_window();
  void reset(std::uint32_t first);
  bool exchange_counts();
  void finish();

  // below: whether it can go on
  std::size_t contribution_bytes() const;
  bool can_reserve(std::size_t bytes);
  bool can_reserve_contribution();
  /// Of all that this rank reads from, at that step; resumes where it stopped.
  bool all_arrived(int& next, std::uint32_t step);
  /// Of all peers, likewise.
  bool all_produced(int& next, std::uint32_t step);
  bool arrived(int peer, std::uint32_t step);
  std::byte* contribution(int rank, std::uint32_t step) const;

  // together_staged.cpp: through letters and rings
  bool advance_one_shot();
  bool advance_two_shot();
  std::uint32_t contribution_step(std::size_t round) const;
  std::uint32_t result_step(std::size_t round) const;
  bool collect_slots(int peer, std::uint32_t step);
  std::size_t chunk_length(std::size_t part, std::size_t round) const;
  std::size_t shard_bytes_of(int rank) const;
  const std::byte* shard_for(int rank) const;
  const std::byte* contribution_of(int peer, std::uint32_t step) const;
  void send_contribution(std::size_t round);
  void send_slots();
  void write_contribution(std::size_t round);
  void read_contributions(std::size_t round);
  void read_from(int peer, std::size_t round, std::uint32_t step);
  void reduce_shard(std::size_t round);
  void gather_shards(std::size_t round);
  void reduce_block(std::byte* to, std::byte* too, std::size_t bytes);
  void reduce_to_output(std::byte* to, std::byte* too, std::size_t bytes);
  void copy_to_output(std::byte* to, const std::byte* bytes_of, std::size_t bytes) const;

  // together_direct.cpp: in memory that all reach
  bool should_exchange_handles();
  ZeroCopyBackoff& zero_copy_backoff();
  std::size_t input_bytes() const;
  LocalBuffers local_buffers() const;
  void publish_handles(const LocalBuffers&);
  bool exchange_handles();
  bool is_mapped(int rank) const;
  void record_outcome(bool direct, bool once);
  void begin_zero_copy();
  void begin_in_chunks(Protocol, std::size_t piece);
  void map_peer(int peer);
  bool advance_zero_copy();
  void read_zero_copy(std::size_t round);
  void reduce_to_all(std::byte* to, std::size_t at, std::size_t bytes);

  // together_once.cpp: copied by the kernel
  bool is_readable(int rank) const;
  void begin_sample(SingleCopyTuner&);
  void end_sample();
  bool chooses_single_copy();
  bool advance_single_copy();
  CmaResult read_single_copy(std::size_t round);
  CmaResult fetch(int from, std::size_t at, std::byte* to, std::size_t bytes);
  void send_end_of_reads();
  bool all_have_read() const;
  void fall_back_to_staged();

  // together_again.cpp: like the last one
  void send_last_contribution();
  void prepare_operands();
  void read_last();
  bool leave_fast_path(int peer, int turns);
  bool run_zero_copy(int turns);
  bool receive_handles();
  bool poll_all_produced(int& next, std::uint32_t step, int& turns);

  MailboxChannel channel_;
  const int rank_, size_;
  const bool oversubscribed_;

  const CollectiveCall* op_ = nullptr;
  CallShape planned_shape_{0, 0, ~0ull};  // of which the plan is; no call has this one
  CallChunks plan_, chunks_;              // as planned; as it came to be once the others were heard
  std::uint64_t key_ = ~0ull;             // of a plan that repeat() serves; no call has this one
  CollectiveCall last_call_;              // what it repeats
  bool fast_path_ = false;                // in one round, with nothing to ask
  bool last_was_zero_copy_ = false;       // the last such call was direct, in one round, cut like direct_
  CallChunks zero_copy_chunks_;
  bool complete_ = true, busy_ = false;
  bool is_sender_ = false;                         // it offers bytes
  int first_sender_ = 0, last_sender_ = 0;         // whose bytes it reads: before the last, and not its own
  bool inline_ = false;                            // in letters
  std::uint32_t slots_ = 1;                        // letters of an offer
  std::uint32_t next_slot_ = 0;                    // of them, the next one to collect
  const IntranodeAlgorithm* algorithm_ = nullptr;  // of which the plan is
  SingleCopyPolicy single_copy_ = SingleCopyPolicy::never;
  bool may_exchange_handles_ = false, exchanges_handles_ = false, exchanges_counts_ = false;
  SingleCopyTuner* sampled_tuner_ = nullptr;  // that this call is one of
  std::chrono::steady_clock::time_point sample_begin_;
  bool cma_refused_ = false;                              // by the kernel, in this call
  bool nontemporal_ = false;                              // results go past the caches
  std::size_t element_bytes_ = 1, total_bytes_ = 0;       // bytes
  std::size_t contributed_ = 0, reduced_ = 0, read_ = 0;  // rounds
  std::uint32_t first_step_ = 0, data_step_ = 0;          // steps
  int next_contribution_ = 0, next_result_ = 0;           // peers that are looked at
  ReduceKernel reduce_kernel_ = nullptr;
  std::unique_ptr<std::byte[]> collected_slots_;  // payloads of each rank's offer of several letters
  std::vector<const void*> sources_;
  std::array<ZeroCopyBackoff, 64> backoffs_{};
  BufferHandles handles_;
  const IntranodeTuningTable table_;
};

// ---- what every tiny call runs through

/// What this rank writes at a step besides its letter.
inline std::size_t IntranodeEngine::contribution_bytes() const {
  if (inline_ || op_->kind == Collective::barrier) return 0;
  return chunks_.per_peer ? chunks_.chunk_bytes * (index(size_) - 1) : chunks_.chunk_bytes;
}

inline bool IntranodeEngine::can_reserve(std::size_t bytes) {
  return channel_.try_reserve(bytes, bytes > 0 && is_sender_);
}

inline bool IntranodeEngine::can_reserve_contribution() {
  const std::size_t bytes = inline_ ? 0 : contribution_bytes();
  return channel_.try_reserve(bytes, bytes > 0 && is_sender_, slots_);
}

inline bool IntranodeEngine::all_arrived(int& next, std::uint32_t step) {
  for (next = std::max(next, first_sender_); next < last_sender_; ++next)
    if (next != rank_ && !arrived(next, step)) return false;
  next = 0;
  return true;
}

inline bool IntranodeEngine::all_produced(int& next, std::uint32_t step) {
  for (; next < size_; ++next)
    if (next != rank_ && !channel_.poll(next, step)) return false;
  next = 0;
  return true;
}

inline bool IntranodeEngine::arrived(int peer, std::uint32_t step) {
  return slots_ == 1 ? channel_.poll(peer, step) : collect_slots(peer, step);
}

inline std::byte* IntranodeEngine::contribution(int r, std::uint32_t step) const {
  if (slots_ > 1) return collected_slots_.get() + index(r) * max_inline_slots * inline_bytes;
  return inline_ ? channel_.payload(r, step) : channel_.bytes(r, step);
}

inline void IntranodeEngine::finish() {
  if (inline_ && traits(op_->kind).root_sends() && rank_ != op_->root)
    channel_.ack_lazily(channel_.next_step());
  else
    channel_.ack(channel_.next_step());
  complete_ = true;
  if (sampled_tuner_) end_sample();
}

}  // namespace rz
