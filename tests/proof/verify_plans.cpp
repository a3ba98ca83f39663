// The verifier of intra-node plans. Three checks over the graph of moves, whose edges are exactly what a rank
// waits for: lifetime of published bytes, values, and completion. "a happens before b" means in every
// interleaving, so that none needs to be simulated.
//
// An acknowledgement that is deferred permits less, and a rank writes it before it blocks. So the graph
// checks only that no rank waits for one that a peer, having completed its last call, never writes.

#include <algorithm>
#include <memory>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tests/proof/move_graph.h"
#include "tests/proof/rank_plans.h"

namespace rz::intranode {

namespace {

using MoveId = MoveGraph::Id;

std::size_t at_rank(int rank) { return static_cast<std::size_t>(rank); }

template <class... T>
[[noreturn]] void refuse_move(const MoveGraph& graph, MoveId id, const T&... parts) {
  throw RefusedPlan{concat(graph.where(id), parts...)};
}

// ---- lifetime

/// No slot or ring byte is overwritten before its last reader, and no rank loses the offset of bytes that it
/// has yet to read.
class LifetimeCheck {
 public:
  LifetimeCheck(const MoveGraph& graph, const StepTable& steps) : graph_(graph), steps_(steps) {}

  void check() const {
    for (MoveId id = 0; id < graph_.nodes().size(); ++id) {
      const PlannedMove& m = *graph_.nodes()[id].move;
      for (std::uint32_t i = 0; i < m.slots; ++i) check_slot(id, steps_.number(m.step + i));
      if (m.slots && m.writes_ring) check_ring(id, steps_.number(m.step));
      for (const PlannedPoll& poll : m.polls) check_offset(id, steps_.number(poll.step));
    }
  }

 private:
  void check_read(MoveId writer, std::size_t step, const char* what) const {
    for (const MoveId reader : graph_.pollers(graph_.nodes()[writer].rank, step))
      if (!graph_.happens_before(reader, writer))
        refuse_move(graph_, writer, "overwrites the ", what, " of step ", steps_.step(step), " before rank ",
                    graph_.nodes()[reader].rank, " has read it");
  }
  void check_slot(MoveId id, std::size_t number) const {
    if (number >= mailbox_depth) check_read(id, number - mailbox_depth, "slot");
  }
  void check_ring(MoveId id, std::size_t number) const {
    const StepTable::Entry& own = steps_.at(number);
    for (std::size_t earlier = 0; earlier < number; ++earlier) {
      const StepTable::Entry& e = steps_.at(earlier);
      const MoveId writer = graph_.publisher(graph_.nodes()[id].rank, earlier);
      if (!graph_.nodes()[writer].move->writes_ring || e.ring_offset >= own.ring_offset + own.ring_bytes ||
          own.ring_offset >= e.ring_offset + e.ring_bytes)
        continue;
      check_read(id, earlier, "bytes");
    }
  }
  /// Offsets are known of the last 256 steps that a rank has reserved.
  void check_offset(MoveId reader, std::size_t number) const {
    if (number + mailbox_depth >= steps_.size()) return;
    const MoveId later = graph_.publisher(graph_.nodes()[reader].rank, number + mailbox_depth);
    if (!graph_.happens_before(reader, later))
      refuse_move(graph_, later, "is reserved before this rank has read step ", steps_.step(number));
  }

  const MoveGraph& graph_;
  const StepTable& steps_;
};

// ---- values

/// A contribution to a sum: bytes of a rank's input.
struct SumTerm {
  int rank;
  std::size_t offset;
  bool operator==(const SumTerm&) const = default;
};
/// Bytes that are the sum of terms, in this order, or a copy of one; each `shift` behind its offset.
struct ByteValue {
  std::shared_ptr<const std::vector<SumTerm>> terms;
  std::size_t shift = 0;
};
struct WrittenPiece {
  std::size_t offset, bytes;
  ByteValue value;
  MoveId writer;
};

/// Follows all bytes from inputs to outputs, of one call.
class ValueCheck {
 public:
  ValueCheck(const MoveGraph& graph, const StepTable& steps, const CallCase& call, const NodeCase& node)
      : graph_(graph),
        steps_(steps),
        call_(call),
        size_(node.size),
        published_(at_rank(size_), std::vector<std::vector<WrittenPiece>>(steps.size())),
        outputs_(at_rank(size_)) {}

  void run(MoveId id) {
    const PlannedMove& m = *graph_.nodes()[id].move;
    for (const PlannedPart& part : m.parts) {
      if (part.bytes == 0) continue;
      const ByteValue value = evaluate(id, part);
      if (part.to == PlannedPart::own_slot)
        publish(id, part, value);
      else if (part.to != PlannedPart::all_outputs)
        outputs_[at_rank(part.to)].push_back({part.offset, part.bytes, value, id});
      else
        for (auto& output : outputs_) output.push_back({part.offset, part.bytes, value, id});
    }
  }
  /// After all moves.
  void check_outputs() {
    for (int r = 0; r < size_; ++r) check_output(r, expected(r));
  }

 private:
  struct ExpectedBlock {
    std::size_t offset, bytes;
    int source;  // all_ranks, or the rank whose input has the bytes
    std::size_t input;
  };
  static constexpr int all_ranks = -1;

  ByteValue evaluate(MoveId id, const PlannedPart& part) const {
    if (part.operands.size() == 1) return find(id, part.operands[0], part.bytes);
    auto terms = std::make_shared<std::vector<SumTerm>>();
    for (const PlannedSource& operand : part.operands) {
      const ByteValue value = find(id, operand, part.bytes);
      if (value.terms->size() != 1 || (!terms->empty() && terms->back().rank >= value.terms->front().rank))
        refuse_move(graph_, id, "does not add in rank order");
      terms->push_back({value.terms->front().rank, value.terms->front().offset + value.shift});
    }
    return {terms, 0};
  }
  ByteValue find(MoveId id, const PlannedSource& s, std::size_t bytes) const {
    if (s.place == PlannedSource::input)
      return {std::make_shared<std::vector<SumTerm>>(1, SumTerm{s.rank, s.offset}), 0};
    check_polled(id, s, bytes);
    for (const WrittenPiece& p : published_[at_rank(s.rank)][steps_.number(s.step)])
      if (p.offset <= s.offset && s.offset + bytes <= p.offset + p.bytes)
        return {p.value.terms, p.value.shift + s.offset - p.offset};
    refuse_move(graph_, id, "reads bytes that rank ", s.rank, " has not written at step ", s.step);
  }
  /// All slots of the bytes were polled: one, if they lie in the ring.
  void check_polled(MoveId id, const PlannedSource& s, std::size_t bytes) const {
    const bool in_ring = steps_.at(steps_.number(s.step)).ring_bytes > 0;
    const std::size_t first = in_ring ? 0 : s.offset / inline_bytes,
                      last = in_ring ? 0 : (s.offset + bytes - 1) / inline_bytes;
    const auto& polls = graph_.nodes()[id].move->polls;
    for (std::size_t i = first; i <= last; ++i) {
      const StepNumber step = s.step + static_cast<StepNumber>(i);
      if (std::none_of(polls.begin(), polls.end(),
                       [&](const PlannedPoll& p) { return p.peer == s.rank && p.step == step; }))
        refuse_move(graph_, id, "reads step ", step, " of rank ", s.rank, ", which it has not polled");
    }
  }
  void publish(MoveId id, const PlannedPart& part, const ByteValue& value) {
    const PlannedMove& m = *graph_.nodes()[id].move;
    const std::size_t room = m.ring_bytes ? m.ring_bytes : m.slots * inline_bytes;
    if (part.offset + part.bytes > room || (m.ring_bytes && !m.writes_ring))
      refuse_move(graph_, id, "writes bytes that it has not reserved");
    auto& pieces = published_[at_rank(graph_.nodes()[id].rank)][steps_.number(m.step)];
    for (const WrittenPiece& p : pieces)
      if (p.offset < part.offset + part.bytes && part.offset < p.offset + p.bytes)
        refuse_move(graph_, id, "publishes bytes twice");
    pieces.push_back({part.offset, part.bytes, value, id});
  }

  /// The output of a rank, by the definition of the collective.
  std::vector<ExpectedBlock> expected(int rank) const {
    const std::size_t n = call_.bytes, own = at_rank(rank) * n;
    const bool is_root = rank == call_.root;
    switch (call_.kind) {
      case Collective::reduce:
        if (!is_root) return {};
        [[fallthrough]];
      case Collective::all_reduce:
        return {{0, n, all_ranks, 0}};
      case Collective::reduce_scatter:
        return {{0, n, all_ranks, own}};
      case Collective::broadcast:
        return {{0, n, call_.root, 0}};
      case Collective::scatter:
        return {{0, n, call_.root, own}};
      case Collective::gather:
        if (!is_root) return {};
        [[fallthrough]];
      case Collective::all_gather:
        return shards([&](int r) { return ExpectedBlock{at_rank(r) * n, n, r, 0}; });
      case Collective::all_to_all:
        return shards([&](int r) { return ExpectedBlock{at_rank(r) * n, n, r, own}; });
      case Collective::all_to_all_v:
        return shards([&](int r) {
          const AllToAllVCounts &mine = call_.counts[at_rank(rank)], &theirs = call_.counts[at_rank(r)];
          return ExpectedBlock{mine.recv_offsets[at_rank(r)], mine.recv_counts[at_rank(r)], r,
                               theirs.send_offsets[at_rank(rank)]};
        });
      default:
        return {};
    }
  }
  template <class F>
  std::vector<ExpectedBlock> shards(const F& block) const {
    std::vector<ExpectedBlock> blocks;
    for (int r = 0; r < size_; ++r) blocks.push_back(block(r));
    std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
    return blocks;
  }

  void check_output(int rank, const std::vector<ExpectedBlock>& blocks) {
    auto& pieces = outputs_[at_rank(rank)];
    std::sort(pieces.begin(), pieces.end(),
              [](const WrittenPiece& a, const WrittenPiece& b) { return a.offset < b.offset; });
    std::size_t next = 0;
    for (const ExpectedBlock& block : blocks)
      for (std::size_t done = 0; done < block.bytes; ++next) {
        const std::size_t at = block.offset + done;
        if (next == pieces.size() || pieces[next].offset > at)
          throw RefusedPlan{concat("rank ", rank, ", no step: byte ", at, " of the output is never written")};
        if (pieces[next].offset < at || pieces[next].offset + pieces[next].bytes > block.offset + block.bytes)
          refuse_move(graph_, pieces[next].writer, "writes byte ", at, " of rank ", rank, "'s output again");
        check_terms(rank, pieces[next], block, done);
        done += pieces[next].bytes;
      }
    if (next < pieces.size())
      refuse_move(graph_, pieces[next].writer, "writes behind the output of rank ", rank);
  }
  void check_terms(int rank, const WrittenPiece& piece, const ExpectedBlock& block, std::size_t done) const {
    const bool sum = block.source == all_ranks;
    const std::vector<SumTerm>& terms = *piece.value.terms;
    bool good = terms.size() == (sum ? at_rank(size_) : 1);
    for (std::size_t i = 0; good && i < terms.size(); ++i)
      good = terms[i].rank == (sum ? static_cast<int>(i) : block.source) &&
             terms[i].offset + piece.value.shift == block.input + done;
    if (!good)
      refuse_move(
          graph_, piece.writer, "byte ", piece.offset, " of rank ", rank, "'s output is not ",
          sum ? "the sum of all ranks" : concat("byte ", block.input + done, " of rank ", block.source));
  }

  const MoveGraph& graph_;
  const StepTable& steps_;
  const CallCase& call_;
  const int size_;
  std::vector<std::vector<std::vector<WrittenPiece>>> published_;  // by rank and number of the step
  std::vector<std::vector<WrittenPiece>> outputs_;                 // by rank
};

// ---- buffers

/// An access of a move to a buffer of a rank: [begin, begin + bytes) of its input, or of its output.
struct BufferAccess {
  std::size_t begin, bytes;
  MoveId by;
  bool overlaps(const BufferAccess& o) const { return begin < o.begin + o.bytes && o.begin < begin + bytes; }
};

/// No rank completes a call while a peer may access its buffers; in place, no input byte is overwritten
/// before its last reader.
class BufferCheck {
 public:
  BufferCheck(const MoveGraph& graph, const CallCase& call, int size)
      : graph_(graph), call_(call), reads_(at_rank(size)), writes_(at_rank(size)), moves_(at_rank(size)) {}

  void note(MoveId id) {
    const MoveGraph::Node& node = graph_.nodes()[id];
    moves_[at_rank(node.rank)].push_back(id);
    for (const PlannedPart& part : node.move->parts) {
      for (const PlannedSource& s : part.operands)
        if (s.place == PlannedSource::input) reads_[at_rank(s.rank)].push_back({s.offset, part.bytes, id});
      for (int r = 0; r < static_cast<int>(writes_.size()); ++r)
        if ((part.to == PlannedPart::all_outputs || part.to == r) && !is_in_place_already(part, r))
          writes_[at_rank(r)].push_back({part.offset, part.bytes, id});
    }
  }
  void check() const {
    for (std::size_t r = 0; r < reads_.size(); ++r) {
      for (const auto& list : {reads_[r], writes_[r]})
        for (const BufferAccess& a : list) check_ended(a.by, static_cast<int>(r));
      if (call_.in_place) check_in_place(static_cast<int>(r));
      if (call_.kind == Collective::barrier) check_entered(static_cast<int>(r));
    }
  }

 private:
  void check_ended(MoveId access, int owner) const {
    const auto& own = moves_[at_rank(owner)];
    if (std::none_of(own.begin(), own.end(), [&](MoveId id) { return graph_.happens_before(access, id); }))
      refuse_move(graph_, access, "accesses a buffer of rank ", owner, " when its call may be complete");
  }
  void check_entered(int rank) const {
    const auto& own = moves_[at_rank(rank)];
    for (const auto& others : moves_)
      if (std::none_of(own.begin(), own.end(),
                       [&](MoveId id) { return graph_.happens_before(others.front(), id); }))
        refuse_move(graph_, others.front(), "rank ", rank, " may leave the barrier before");
  }
  /// Offset of the output in the input, or the negative of the input in the output.
  std::ptrdiff_t output_in_input(int rank) const {
    const auto shard = static_cast<std::ptrdiff_t>(call_.bytes) * rank;
    if (traits(call_.kind).in == traits(call_.kind).out) return 0;
    return traits(call_.kind).in == Extent::shard ? -shard : shard;
  }
  /// The part would be copied to where it is, so nothing is written.
  bool is_in_place_already(const PlannedPart& part, int rank) const {
    const PlannedSource& s = part.operands[0];
    return call_.in_place && part.operands.size() == 1 && s.place == PlannedSource::input && s.rank == rank &&
           s.offset == part.offset + static_cast<std::size_t>(output_in_input(rank));
  }
  void check_in_place(int rank) const {
    const std::ptrdiff_t shift = output_in_input(rank);
    for (BufferAccess write : writes_[at_rank(rank)])
      for (BufferAccess read : reads_[at_rank(rank)]) {
        (shift > 0 ? write : read).begin += static_cast<std::size_t>(std::abs(shift));
        const bool same = read.by == write.by && read.begin == write.begin;
        if (read.overlaps(write) && !same && !graph_.happens_before(read.by, write.by))
          refuse_move(graph_, write.by, "overwrites the input of rank ", rank, " before it is read");
        (shift > 0 ? write : read).begin -= static_cast<std::size_t>(std::abs(shift));
      }
  }

  const MoveGraph& graph_;
  const CallCase& call_;
  std::vector<std::vector<BufferAccess>> reads_, writes_;  // by owner
  std::vector<std::vector<MoveId>> moves_;                 // by rank, in this call
};

void prove_plans(std::span<const RankPlan> plans, std::span<const CallCase> calls, const NodeCase& node) {
  const StepTable steps(plans, node);
  const MoveGraph graph(plans, node, steps);
  LifetimeCheck(graph, steps).check();
  std::vector<ValueCheck> values;
  std::vector<BufferCheck> buffers;
  for (const CallCase& call : calls) {
    values.emplace_back(graph, steps, call, node);
    buffers.emplace_back(graph, call, node.size);
  }
  for (const MoveId id : graph.order()) {
    const MoveGraph::Node& n = graph.nodes()[id];
    const std::size_t call = plans[at_rank(n.rank)].phases[n.phase].call;
    values[call].run(id);
    buffers[call].note(id);
  }
  for (ValueCheck& v : values) v.check_outputs();
  for (const BufferCheck& b : buffers) b.check();
}

}  // namespace

std::string verify_plans(std::span<const RankPlan> plans, std::span<const CallCase> calls,
                         const NodeCase& node) {
  try {
    prove_plans(plans, calls, node);
    return {};
  } catch (const RefusedPlan& refused) {
    return refused.reason;
  }
}

}  // namespace rz::intranode
