#pragma once
/// Collectives among ranks of one host, without frames or streams: what comm/backends/execution.h does for
/// any transport, by letters in the ranks' meeting places (comm/backends/letters.h).
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

#include "comm/backends/doubt.h"
#include "comm/backends/letters.h"
#include "comm/backends/memory_offers.h"
#include "comm/collective.h"
#include "comm/reduce.h"
#include "comm/select_together.h"

namespace rz {

class Together {
 public:
  /// Of a transport that has a meeting(). `first_step`: see Letters.
  Together(Transport&, int rank, int size, std::uint32_t first_step = 0);
  Together(Transport&, int rank, int size, TogetherTable, std::uint32_t first_step = 0);

  /// Begins the call of that number. The operation must outlive it, or move().
  void start(const Operation&, std::uint32_t sequence);
  /// Bytes of the whole of a call that is tried at once.
  static constexpr std::size_t most_at_once = 256 << 10;

  /// Whether the call is like the last one, of that many bytes at most.
  bool repeats(const BriefCall& call) const {
    return call.what == brief_ && call.count == letters_.call().count;
  }
  /// start() and spin() of such a call: the shortest way.
  bool repeat(const BriefCall&, std::uint32_t sequence, int turns);
  const Operation& operation() const { return *op_; }
  /// The operation lies elsewhere now.
  void move(const Operation& op) { op_ = &op; }
  /// Moves what can be moved; true if anything was. Errc::mismatch if a peer is in another call.
  bool advance();
  /// advance() until the call is complete or `turns` turns went by, on a crowded host half a millisecond at
  /// most, and then claim(). True: complete. A large call is moved in parts of some most_at_a_spin bytes,
  /// between which its caller looks at failures and deadlines.
  bool spin(int turns);
  static constexpr std::size_t most_at_a_spin = 8 << 20;
  /// The last spin() ended after such a part: there is more to move at once.
  bool busy() const { return busy_; }
  bool complete() const { return complete_; }
  /// It does not go on without some peer: a failure, if that one has left.
  void claim() { letters_.claim(); }

  /// The schedule that serves the call instead, over streams; null: none does. start() is for the others.
  const TogetherWay* streams(const Operation& op) const {
    return table_.may_stream(op.kind) ? find_streams(op) : nullptr;
  }
  /// Any thread.
  const TogetherTable& table() const { return table_; }
  TogetherRoom room() const {
    return {std::min(letters_.ring_bytes(), crowded_ ? most_in_turns_if_crowded : most_in_turns), crowded_};
  }

  RankSet debtors() const;
  std::string waiting_for() const;
  int culprit() const;

 private:
  enum class Flow { one_phase, two_phase, direct, once };
  // What a plan depends on; calls mostly are like the last one.
  struct Shape {
    std::size_t in, out;
    std::uint64_t what;
    bool operator==(const Shape&) const = default;
  };

  // How a call is cut: into parts, if each of a rank's peers reads its own, and into rounds.
  struct Cut {
    Flow flow = Flow::one_phase;
    bool split = false;
    std::size_t part = 0, piece = 0, rounds = 0;  // bytes of a part, and of it in a round
  };

  static constexpr std::size_t block = 8 << 10;  // of several passes over the same bytes, in the first cache
  // Bytes of the ring that pieces of a call are cut for, and that large exchanges take turns in.
  static constexpr std::size_t most_in_turns = 768 << 10, most_in_turns_if_crowded = 256 << 10;

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  // together.cpp: what a call comes to
  static Shape shape_of(const Operation&);
  const TogetherWay* find_streams(const Operation&) const;
  void plan();
  std::uint64_t brief_of_plan() const;
  void choose_peers();
  bool offers(int rank) const;
  bool reads_from(int peer) const { return peer >= first_giver_ && peer < last_giver_; }
  bool looks_at(int peer) const;
  void use_ring();
  void rewind(std::uint32_t first);
  bool exchange_counts();
  void end();

  // below: whether it can go on
  std::size_t bytes_of_offer() const;
  bool has_room(std::size_t bytes);
  bool has_room_to_offer();
  /// Of all that this rank reads from, at that step; resumes where it stopped.
  bool all_arrived(int& next, std::uint32_t step);
  /// Of all peers, likewise.
  bool all_wrote(int& next, std::uint32_t step);
  bool has_arrived(int peer, std::uint32_t step);
  std::byte* place(int rank, std::uint32_t step) const;

  // together_staged.cpp: through letters and rings
  bool advance_one_phase();
  bool advance_two_phase();
  std::uint32_t step_a(std::size_t round) const;
  std::uint32_t step_b(std::size_t round) const;
  bool collected(int peer, std::uint32_t step);
  std::size_t length(std::size_t part, std::size_t round) const;
  std::size_t part_of(int rank) const;
  const std::byte* part_to(int rank) const;
  const std::byte* from(int peer, std::uint32_t step) const;
  void offer_and_publish(std::size_t round);
  void publish_lines();
  void offer(std::size_t round);
  void take(std::size_t round);
  void take_from(int peer, std::size_t round, std::uint32_t step);
  void fold_part(std::size_t round);
  void gather_parts(std::size_t round);
  void fold(std::byte* to, std::byte* too, std::size_t bytes);
  void fold_out(std::byte* to, std::byte* too, std::size_t bytes);
  void copy_out(std::byte* to, const std::byte* bytes_of, std::size_t bytes) const;

  // together_direct.cpp: in memory that all reach
  bool is_worth_asking();
  Doubt& doubt();
  std::size_t bytes_in() const;
  OwnMemory own_memory() const;
  void make_offer(const OwnMemory&);
  bool ask();
  bool is_reachable(int rank) const;
  void conclude(bool direct, bool once);
  void begin_direct();
  void begin_in_pieces(Flow, std::size_t piece);
  void reach(int peer);
  bool advance_direct();
  void take_direct(std::size_t round);
  void fold_for_all(std::byte* to, std::size_t at, std::size_t bytes);

  // together_once.cpp: copied by the kernel
  bool is_readable(int rank) const;
  void begin_trial(WayByTime&);
  void end_trial();
  bool chooses_once();
  bool advance_once();
  PeerRead take_once(std::size_t round);
  PeerRead fetch(int from, std::size_t at, std::byte* to, std::size_t bytes);
  void publish_end_of_reads();
  bool all_have_read() const;
  void stage_after_all();

  // together_again.cpp: like the last one
  void offer_again();
  void prepare_to_take();
  void take_again();
  bool stay(int peer, int turns);
  bool repeat_direct(int turns);
  bool hear_again();
  bool all_write_soon(int& next, std::uint32_t step, int& turns);

  Letters letters_;
  const int rank_, size_;
  const bool crowded_;

  const Operation* op_ = nullptr;
  Shape planned_{0, 0, ~0ull};   // of which the plan is; no call has this one
  Cut plan_, cut_;               // as planned; as it came to be once the others were heard
  std::uint64_t brief_ = ~0ull;  // of a plan that repeat() serves; no call has this one
  Operation again_;              // what it repeats
  bool short_way_ = false;       // in one round, with nothing to ask
  bool direct_again_ = false;    // the last such call was direct, in one round, cut like direct_
  Cut direct_;
  bool complete_ = true, busy_ = false;
  bool gives_ = false;                    // it offers bytes
  int first_giver_ = 0, last_giver_ = 0;  // whose bytes it reads: before the last, and not its own
  bool inline_ = false;                   // in letters
  std::uint32_t lines_ = 1;               // letters of an offer
  std::uint32_t line_ = 0;                // of them, the next one to collect
  const TogetherWay* way_ = nullptr;      // of which the plan is
  Once once_ = Once::never;
  bool may_ask_ = false, asks_ = false, counts_ = false;
  WayByTime* trial_ = nullptr;  // that this call is one of
  std::chrono::steady_clock::time_point began_;
  bool refused_ = false;                              // by the kernel, in this call
  bool bypass_ = false;                               // results go past the caches
  std::size_t element_ = 1, total_ = 0;               // bytes
  std::size_t offered_ = 0, folded_ = 0, taken_ = 0;  // rounds
  std::uint32_t first_ = 0, base_ = 0;                // steps
  int waits_a_ = 0, waits_b_ = 0;                     // peers that are looked at
  Reduction reduction_ = nullptr;
  std::unique_ptr<std::byte[]> collected_;  // payloads of each rank's offer of several letters
  std::vector<const void*> sources_;
  std::array<Doubt, 64> doubts_{};
  MemoryOffers memory_;
  const TogetherTable table_;
};

// ---- what every tiny call runs through

/// What this rank writes at a step besides its letter.
inline std::size_t Together::bytes_of_offer() const {
  if (inline_ || op_->kind == Collective::barrier) return 0;
  return cut_.split ? cut_.piece * (index(size_) - 1) : cut_.piece;
}

inline bool Together::has_room(std::size_t bytes) { return letters_.has_room(bytes, bytes > 0 && gives_); }

inline bool Together::has_room_to_offer() {
  const std::size_t bytes = inline_ ? 0 : bytes_of_offer();
  return letters_.has_room(bytes, bytes > 0 && gives_, lines_);
}

inline bool Together::all_arrived(int& next, std::uint32_t step) {
  for (next = std::max(next, first_giver_); next < last_giver_; ++next)
    if (next != rank_ && !has_arrived(next, step)) return false;
  next = 0;
  return true;
}

inline bool Together::all_wrote(int& next, std::uint32_t step) {
  for (; next < size_; ++next)
    if (next != rank_ && !letters_.arrived(next, step)) return false;
  next = 0;
  return true;
}

inline bool Together::has_arrived(int peer, std::uint32_t step) {
  return lines_ == 1 ? letters_.arrived(peer, step) : collected(peer, step);
}

inline std::byte* Together::place(int r, std::uint32_t step) const {
  if (lines_ > 1) return collected_.get() + index(r) * most_letters * letter_bytes;
  return inline_ ? letters_.payload(r, step) : letters_.bytes(r, step);
}

inline void Together::end() {
  if (inline_ && traits(op_->kind).root_sends() && rank_ != op_->root)
    letters_.have_read_by(letters_.next());
  else
    letters_.have_read_up_to(letters_.next());
  complete_ = true;
  if (trial_) end_trial();
}

}  // namespace rz
