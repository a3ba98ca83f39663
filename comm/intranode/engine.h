#pragma once
/// Intra-node collectives over shared memory, by mailbox slots instead of transport streams (which serve
/// comm/schedule/executor.h). See README.md in this folder.
///
/// A call is a sequence of steps, the same on every rank. At each step a rank publishes one slot: with an
/// inline payload, with bytes in its staging ring, or with buffer handles. Four protocols:
///   one_shot     every rank reads every contribution that it needs from slots or staging rings.
///   two_shot     all_reduce: rank r reduces shard r, and an all_gather follows; both through staging rings.
///   zero_copy    peers read registered inputs in place; in an all_reduce rank r writes shard r into the
///                registered outputs of all ranks. No call completes before all ranks have done so. After a
///                failure a peer may still write into the output for a short time.
///   single_copy  data movement only: receivers copy out of the owner's process (process_vm_readv).
/// Reductions are in rank order in all of them, so results have the bits of every rank-ordered
/// schedule.
///
/// Not thread safe, but for table(): one thread at a time drives the engine.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/collective.h"
#include "comm/intranode/buffer_handles.h"
#include "comm/intranode/mailbox_channel.h"
#include "comm/intranode/zero_copy_backoff.h"
#include "comm/progress/collective_engine.h"
#include "comm/reduce/reduce.h"
#include "comm/transport/transport.h"
#include "comm/tuning/intranode.h"

namespace rz {

class IntranodeEngine final : public CollectiveEngine {
 public:
  /// Requires shared_memory() with mailboxes(). `first_step`: see MailboxChannel.
  IntranodeEngine(Transport&, int rank, int size, std::uint32_t first_step = 0);
  IntranodeEngine(Transport&, int rank, int size, IntranodeTuningTable, std::uint32_t first_step = 0);

  /// Begins the call of that sequence number; requires complete(). The CollectiveCall must outlive the call,
  /// unless rebind() replaces it.
  void start(const CollectiveCall&, std::uint32_t sequence) override;
  /// Largest message, in bytes, that the caller's own thread tries before the progress engine gets it.
  static constexpr std::size_t max_inline_bytes = 256 << 10;

  /// True if run_fast_path() can run the call: it has the plan of the last call, and that plan has a key.
  bool matches_last(const CallKey& call) const {
    return call.key == key_ && call.count == channel_.call().count;
  }
  /// start() and spin() of such a call, with the fewest instructions. True: complete. False: call() goes on
  /// with advance() or spin().
  bool run_fast_path(const CallKey&, std::uint32_t sequence, int turns);
  const CollectiveCall& call() const { return *op_; }
  /// Replaces the current call by an equal one at another address.
  void rebind(const CollectiveCall& op) { op_ = &op; }
  /// Moves data without blocking; true on any progress. Errc::mismatch if a peer made another call.
  bool advance() override;
  /// advance() until the call is complete or `turns` polls have failed; on an oversubscribed node it yields
  /// between polls, for 500 us at most. Then check_peer_alive(). True: complete. Returns early, with busy(),
  /// after max_spin_bytes bytes, so that the caller can check failures and deadlines during large calls.
  bool spin(int turns);
  static constexpr std::size_t max_spin_bytes = 8 << 20;
  /// The last spin() returned after max_spin_bytes: there is more to move without waiting.
  bool busy() const { return busy_; }
  bool complete() const override { return complete_; }
  /// Throws if the peer that the call waits for has left the group.
  void check_peer_alive() { channel_.check_peer_alive(); }

  /// The tuning entry whose schedule serves the call, by the executor; null: call start().
  const IntranodeAlgorithm* schedule_for(const CollectiveCall& op) const {
    return table_.has_schedule(op.kind) ? find_schedule(op) : nullptr;
  }
  /// Thread safe.
  const IntranodeTuningTable& table() const { return table_; }
  /// What plan_call() may use of the staging ring.
  StagingLimits limits() const {
    return {std::min(channel_.staging_bytes(),
                     oversubscribed_ ? max_staging_window_oversubscribed : max_staging_window),
            oversubscribed_};
  }

  WaitState waiting_on() const override;

 private:
  enum class Protocol { one_shot, two_shot, zero_copy, single_copy };
  // All that a plan depends on. A call of the last call's shape reuses its plan.
  struct CallShape {
    std::size_t in, out;
    std::uint64_t key;
    bool operator==(const CallShape&) const = default;
  };

  // How a call is divided: into shards, if each peer reads its own (per_peer), and each shard into chunks. A
  // round moves one chunk of every shard.
  struct CallChunks {
    Protocol protocol = Protocol::one_shot;
    bool per_peer = false;
    std::size_t shard_bytes = 0, chunk_bytes = 0, chunks = 0;
  };

  static constexpr std::size_t block_bytes = 8 << 10;  // fits L1: several passes over the same bytes
  // Bytes of the staging ring that chunk sizes assume, and that large symmetric calls use.
  static constexpr std::size_t max_staging_window = 768 << 10, max_staging_window_oversubscribed = 256 << 10;

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  // engine.cpp: plan of a call
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

  // below, inline: progress conditions
  std::size_t contribution_bytes() const;
  bool can_reserve(std::size_t bytes);
  bool can_reserve_contribution();
  /// True once all ranks that this one reads from have published that step. `next` is the rank to resume
  /// with.
  bool all_arrived(int& next, std::uint32_t step);
  /// The same for all peers.
  bool all_produced(int& next, std::uint32_t step);
  bool arrived(int peer, std::uint32_t step);
  std::byte* contribution(int rank, std::uint32_t step) const;

  // staged.cpp: one_shot and two_shot
  bool advance_one_shot();
  bool advance_two_shot();
  std::uint32_t contribution_step(std::size_t round) const;
  std::uint32_t result_step(std::size_t round) const;
  bool collect_slots(int peer, std::uint32_t step);
  std::size_t chunk_length(std::size_t shard, std::size_t round) const;
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

  // zero_copy.cpp: handle exchange and zero_copy
  bool should_exchange_handles();
  ZeroCopyBackoff& zero_copy_backoff();
  std::size_t input_bytes() const;
  LocalBuffers local_buffers() const;
  void publish_handles(const LocalBuffers&);
  bool exchange_handles();
  bool is_mapped(int rank) const;
  void record_outcome(bool zero_copy, bool single_copy);
  void begin_zero_copy();
  void begin_in_chunks(Protocol, std::size_t chunk_bytes);
  void map_peer(int peer);
  bool advance_zero_copy();
  void read_zero_copy(std::size_t round);
  void reduce_to_all(std::byte* to, std::size_t at, std::size_t bytes);

  // single_copy.cpp
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

  // fast_path.cpp: a call with the last call's plan
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
  CallShape planned_shape_{0, 0, ~0ull};  // that plan_ is for; this initial value equals no call's
  CallChunks plan_, chunks_;         // as planned; of the current call, after the handle or count exchange
  std::uint64_t key_ = ~0ull;        // CallKey::key of the plan; ~0: no fast path
  CollectiveCall last_call_;         // the call that run_fast_path() repeats
  bool fast_path_ = false;           // one_shot, one round, no handle exchange
  bool last_was_zero_copy_ = false;  // the last call of this plan was zero_copy in one round
  CallChunks zero_copy_chunks_;      // of that call
  bool complete_ = true, busy_ = false;
  bool is_sender_ = false;                         // this rank contributes bytes
  int first_sender_ = 0, last_sender_ = 0;         // the ranks it reads from: [first, last), without itself
  bool inline_ = false;                            // contributions are slot payloads
  std::uint32_t slots_ = 1;                        // slots of a contribution
  std::uint32_t next_slot_ = 0;                    // the next of them to collect
  const IntranodeAlgorithm* algorithm_ = nullptr;  // tuning entry of the plan
  SingleCopyPolicy single_copy_ = SingleCopyPolicy::never;
  bool may_exchange_handles_ = false, exchanges_handles_ = false, exchanges_counts_ = false;
  SingleCopyTuner* sampled_tuner_ = nullptr;  // this call is a sample of it
  std::chrono::steady_clock::time_point sample_begin_;
  bool cma_refused_ = false;                              // the kernel refused a read of this call
  bool nontemporal_ = false;                              // results are stored past the caches
  std::size_t element_bytes_ = 1, total_bytes_ = 0;       // of an element; of count_per_rank elements
  std::size_t contributed_ = 0, reduced_ = 0, read_ = 0;  // rounds completed, by phase
  std::uint32_t first_step_ = 0, data_step_ = 0;          // of the call; of its first contribution
  int next_contribution_ = 0, next_result_ = 0;           // peers that polling resumes with
  ReduceKernel reduce_kernel_ = nullptr;
  std::unique_ptr<std::byte[]> collected_slots_;  // payloads of contributions of several slots, contiguous
  std::vector<const void*> sources_;              // operands of a reduction, by rank
  std::array<ZeroCopyBackoff, 64> backoffs_{};
  BufferHandles handles_;
  const IntranodeTuningTable table_;
};

// ---- inline: the path of every small call

/// Bytes of the staging ring that a contribution of one round occupies.
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
