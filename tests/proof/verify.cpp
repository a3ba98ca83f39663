// The verifier: runs a schedule on all ranks at once, with expressions in place of numbers.
//
// The dependencies of the steps form a graph that does not depend on timing: a reader follows the last writer
// of its chunk, a writer follows its last writer and all readers since, a send follows the previous send to
// the same peer. Nothing is buffered: a reduction fires when its dependencies are done *and* all of its
// messages are ready at their senders, and those sends complete at that moment. The graph orders all
// conflicting steps, so every execution yields the same values, and one run proves all of them. Steps that
// remain at the end are deadlocked.
//
// Mixtures of ranks in place and out of place need no run of their own, if the run with all ranks in place
// and the run with none send the same values. Proof: a rank's values depend on the messages that it receives
// and on its own memory, so a mixture sends these values, too, and each rank ends as in the run of its own
// kind. There is no deadlock either: no step writes an input, so the dependencies of a rank out of place are
// a subset of those in place, with or without elided copies.

#include "tests/proof/verify.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/schedule/dependency_plan.h"
#include "tests/proof/symbolic_sums.h"

namespace rz::schedule {

namespace {

struct Refused {
  std::string reason;
};

template <class... T>
[[noreturn]] void refuse(const T&... parts) {
  throw Refused{concat(parts...)};
}

bool all_to_all(Collective c) { return c == Collective::all_to_all || c == Collective::all_to_all_v; }

/// A set of chunks: first, first + stride, …
struct Chunks {
  int count = 0, first = 0, stride = 1;
  /// Index of a chunk in the set, or -1.
  int index_of(int chunk) const {
    const int distance = chunk - first;
    return distance >= 0 && distance % stride == 0 && distance / stride < count ? distance / stride : -1;
  }
  int operator[](int i) const { return first + i * stride; }
};

/// The chunks of a rank's input.
Chunks inputs(Collective c, RankContext context, int chunks) {
  const Chunks all{chunks}, own{1, context.rank};
  switch (c) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::reduce_scatter:
      return all;
    case Collective::broadcast:
    case Collective::scatter:
      return context.rank == context.root ? all : Chunks{};
    case Collective::all_gather:
    case Collective::gather:
      return own;
    case Collective::all_to_all:
    case Collective::all_to_all_v:
      return {context.size, context.rank * context.size};
    default:
      return {};
  }
}

/// The chunks of a rank's output.
Chunks outputs(Collective c, RankContext context, int chunks) {
  const Chunks all{chunks}, own{1, context.rank};
  switch (c) {
    case Collective::all_reduce:
    case Collective::broadcast:
    case Collective::all_gather:
      return all;
    case Collective::reduce:
    case Collective::gather:
      return context.rank == context.root ? all : Chunks{};
    case Collective::reduce_scatter:
    case Collective::scatter:
      return own;
    case Collective::all_to_all:
    case Collective::all_to_all_v:
      return {context.size, context.rank, context.size};
    default:
      return {};
  }
}

/// Number of chunks that the collective prescribes; 0: any.
int prescribed_chunks(Collective c, int size) {
  if (c == Collective::barrier) return 1;
  if (all_to_all(c)) return size * size;
  const bool free = c == Collective::all_reduce || c == Collective::reduce || c == Collective::broadcast;
  return free ? 0 : size;
}

/// Value of a chunk in a region. `exact` includes where partial sums were stored, which rounds 8- and 16-bit
/// floats; `plain` is the sum alone.
struct Value {
  SymbolicSums::Id exact = -1, plain = -1;
  int chunk = -1;
  int rounds = 0;  // messages in the longest chain that leads to it
  bool finished = false;
};

struct Case {
  ScheduleFunction function;
  Collective collective;
  int size, root;
  std::span<const int> node_of_rank;
  ReductionOrder order;
};

/// Form of the calls of all ranks in a run.
enum class Memory { apart, apart_without_copies, in_place };

class Verifier {
 public:
  Verifier(const Case& what, Memory memory, SymbolicSums& expressions)
      : case_(what),
        collective_(what.collective),
        size_(what.size),
        in_place_(memory == Memory::in_place),
        expressions_(expressions) {
    for (int r = 0; r < size_; ++r) {
      Schedule schedule = what.function(context(r));
      if (memory == Memory::apart_without_copies) elide_scratch_copies(schedule);
      add_rank(std::move(schedule));
    }
  }

  std::size_t steps() const { return nodes_.size(); }

  /// Requires that both runs have proved. Error if their ranks send different values; `how` describes the
  /// difference.
  void compare(const Verifier& other, const char* how) const {
    const std::vector<int> mine = sends(),
                           theirs = other.sends();  // elide_scratch_copies() removes none
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const Value &a = nodes_[mine[i]].sent, &b = other.nodes_[theirs[i]].sent;
      if (a.exact != b.exact || a.plain != b.plain || a.finished != b.finished)
        refuse(where(mine[i], a.chunk), "sends another value ", how);
    }
    if (results_ != other.results_) refuse("a result is summed or rounded in another order ", how);
  }

  Verification prove() {
    match_messages();
    for (int r = 0; r < size_; ++r) order_steps(r);
    run();
    check_no_pending();
    Verification proof;
    if (collective_ == Collective::barrier) check_all_contributions();
    const Order order = check_outputs();
    proof.rank_order = order.by_rank && traits(collective_).reduces;
    proof.pairwise_order = order.pairwise && traits(collective_).reduces;
    proof.rounded_once = order.rounded_once && traits(collective_).reduces;
    proof.depth = rounds_;
    return proof;
  }

 private:
  // Ids of steps, memory locations, operands and edges are unique over all ranks; -1: none.
  struct Node {
    const Step* step;
    int rank, index;
    int pending = 0;      // dependencies that are not done
    int partner = -1;     // send: the reduction that receives it; reduce: its first operand
    int first_edge = -1;  // of the list of dependent steps
    bool done = false;
    Value sent{};
  };
  struct Edge {
    int to, next;
  };
  struct Location {
    Value value;
    int writer = -1, first_reader = -1;
  };
  struct Reader {
    int step, next;
  };
  struct Rank {
    Schedule schedule;
    Chunks inputs, outputs;
    int first_step, first_location;
    std::vector<std::uint64_t> received_from;
  };

  RankContext context(int rank) const { return {rank, size_, case_.root, case_.node_of_rank, case_.order}; }
  std::string where(int step, int chunk) const {
    return concat("rank ", nodes_[step].rank, ", step ", nodes_[step].index, ", chunk ", chunk, ": ");
  }

  void add_rank(Schedule schedule) {
    const int r = static_cast<int>(ranks_.size());
    const int chunks = schedule.chunks, prescribed = prescribed_chunks(collective_, size_);
    if (chunks < 1 || (prescribed && chunks != prescribed))
      refuse("rank ", r, " cuts ", name(collective_), " into ", chunks, " chunks instead of ",
             prescribed ? concat(prescribed) : std::string("1 or more"));
    if (r > 0 && chunks != ranks_[0].schedule.chunks)
      refuse("rank ", r, " cuts the buffer into ", chunks, " chunks, rank 0 into ",
             ranks_[0].schedule.chunks);
    ranks_.push_back({std::move(schedule),
                      inputs(collective_, context(r), chunks),
                      outputs(collective_, context(r), chunks),
                      static_cast<int>(nodes_.size()),
                      static_cast<int>(locations_.size()),
                      {}});
    const Rank& rank = ranks_.back();
    lay_out_memory(r);
    // Elements of a vector keep their addresses when the Rank that holds it moves.
    int index = 0;
    for (const Step& step : rank.schedule.steps) {
      nodes_.push_back({&step, r, index++});
      check_step(static_cast<int>(nodes_.size()) - 1);
    }
  }

  void lay_out_memory(int r) {
    Rank& rank = ranks_[r];
    const int cells = std::max(0, rank.schedule.scratch_cells);
    locations_.resize(locations_.size() +
                      static_cast<std::size_t>(rank.inputs.count + rank.outputs.count + cells));
    for (int i = 0; i < rank.inputs.count; ++i) {
      const int chunk = rank.inputs[i];
      const auto leaf = expressions_.leaf(r, chunk);
      locations_[rank.first_location + i].value = {leaf, leaf, chunk, 0, false};
    }
    if (collective_ != Collective::barrier) return;
    rank.received_from.resize(static_cast<std::size_t>(expressions_.words_per_set()));
    const auto leaf = expressions_.leaf(r, 0);
    for (int i = 0; i < cells; ++i) locations_[rank.first_location + i].value = {leaf, leaf, 0, 0, false};
    note_received(rank, leaf);
  }

  void check_step(int id) const {
    const Step& step = *nodes_[id].step;
    check_chunk(id, step.chunk);
    if (step.kind == Step::send) return check_peer(id, step.peer, step.chunk.number);
    const std::string here = where(id, step.chunk.number);
    if (step.chunk.region == Region::input) refuse(here, "writes its input");
    if (step.operands.empty()) refuse(here, "combines nothing");
    if (!traits(collective_).reduces && step.final) refuse(here, "is marked final, but nothing is reduced");
    if (!traits(collective_).reduces && collective_ != Collective::barrier && step.operands.size() > 1)
      refuse(here, "adds, but ", name(collective_), " does not reduce");
    for (const Operand& term : step.operands) {
      if (term.peer >= 0) check_peer(id, term.peer, step.chunk.number);
      if (term.peer >= 0) continue;
      check_chunk(id, term.chunk);
      if (term.chunk.number != step.chunk.number) refuse(here, "takes chunk ", term.chunk.number, " for it");
    }
  }

  void check_peer(int id, int peer, int chunk) const {
    if (peer < 0 || peer >= size_ || peer == nodes_[id].rank)
      refuse(where(id, chunk), "rank ", peer, " is no peer of this rank");
  }

  void check_chunk(int id, ChunkRef ref) const {
    const Rank& rank = ranks_[nodes_[id].rank];
    if (ref.region == Region::input && rank.inputs.index_of(ref.number) < 0)
      refuse(where(id, ref.number), "this rank's input does not hold it");
    if (ref.region == Region::output && rank.outputs.index_of(ref.number) < 0)
      refuse(where(id, ref.number), "this rank's output does not hold it");
    if (ref.number < 0 || ref.number >= rank.schedule.chunks)
      refuse(where(id, ref.number), "there are ", rank.schedule.chunks, " chunks");
    if (ref.region == Region::scratch && (ref.cell < 0 || ref.cell >= rank.schedule.scratch_cells))
      refuse(where(id, ref.number), "scratch cell ", ref.cell, " of ", rank.schedule.scratch_cells);
  }

  int locate(int r, ChunkRef ref) const {
    const Rank& rank = ranks_[r];
    const int as_input = rank.inputs.index_of(ref.number);
    int offset = rank.inputs.count;
    if (ref.region == Region::input || (ref.region == Region::output && in_place_ && as_input >= 0))
      offset = as_input;
    else if (ref.region == Region::output)
      offset += rank.outputs.index_of(ref.number);
    else
      offset += rank.outputs.count + ref.cell;
    return rank.first_location + offset;
  }

  // The k-th send of a rank to a peer matches the k-th operand that the peer receives from it.
  void match_messages() {
    std::vector<int> next_send(nodes_.size(), -1);
    std::vector<int> first(static_cast<std::size_t>(size_) * size_, -1), last = first;
    for (int id = 0; id < static_cast<int>(nodes_.size()); ++id) {
      if (nodes_[id].step->kind != Step::send) continue;
      const int pair = nodes_[id].rank * size_ + nodes_[id].step->peer;
      (first[pair] < 0 ? first[pair] : next_send[last[pair]]) = id;
      if (last[pair] >= 0) wait_for(id, last[pair]);
      last[pair] = id;
    }
    for (int id = 0; id < static_cast<int>(nodes_.size()); ++id) {
      if (nodes_[id].step->kind != Step::reduce) continue;
      nodes_[id].partner = static_cast<int>(messages_.size());
      for (const Operand& term : nodes_[id].step->operands) {
        int& head = first[std::max(0, term.peer) * size_ + nodes_[id].rank];
        messages_.push_back(term.peer < 0 ? -1 : head);
        if (term.peer < 0) continue;
        match(head, id, term.peer);
        head = next_send[head];
      }
    }
    for (int head : first)
      if (head >= 0)
        refuse(where(head, nodes_[head].step->chunk.number), "rank ", nodes_[head].step->peer,
               " never receives this message");
  }

  void match(int send, int combine, int peer) {
    const int chunk = nodes_[combine].step->chunk.number;
    if (send < 0) refuse(where(combine, chunk), "rank ", peer, " sends no message for this");
    const int sent = nodes_[send].step->chunk.number;
    if (sent != chunk)
      refuse(where(combine, chunk), "rank ", peer, " sends chunk ", sent, " for it (its step ",
             nodes_[send].index, ")");
    nodes_[send].partner = combine;
    ++nodes_[combine].pending;
  }

  void wait_for(int step, int before) {
    if (before < 0 || before == step) return;
    edges_.push_back({step, nodes_[before].first_edge});
    nodes_[before].first_edge = static_cast<int>(edges_.size()) - 1;
    ++nodes_[step].pending;
  }

  void order_steps(int r) {
    const int begin = ranks_[r].first_step;
    const int end = begin + static_cast<int>(ranks_[r].schedule.steps.size());
    for (int id = begin; id < end; ++id) {
      const Step& step = *nodes_[id].step;
      if (step.kind == Step::send) read(id, locate(r, step.chunk));
      for (const Operand& term : step.operands)
        if (term.peer < 0) read(id, locate(r, term.chunk));
      if (step.kind == Step::reduce) write(id, locate(r, step.chunk));
    }
  }

  void read(int id, int location) {
    Location& l = locations_[location];
    wait_for(id, l.writer);
    readers_.push_back({id, l.first_reader});
    l.first_reader = static_cast<int>(readers_.size()) - 1;
  }

  void write(int id, int location) {
    Location& l = locations_[location];
    wait_for(id, l.writer);
    for (int i = l.first_reader; i >= 0; i = readers_[i].next) wait_for(id, readers_[i].step);
    l.writer = id;
    l.first_reader = -1;
  }

  void run() {
    for (int id = static_cast<int>(nodes_.size()) - 1; id >= 0; --id)
      if (nodes_[id].pending == 0) ready_.push_back(id);
    while (!ready_.empty()) {
      const int id = ready_.back();
      ready_.pop_back();
      if (nodes_[id].step->kind == Step::send)
        decrement(nodes_[id].partner);
      else
        complete_node(id);
    }
  }

  void decrement(int id) {
    if (--nodes_[id].pending == 0) ready_.push_back(id);
  }

  void finish(int id) {
    nodes_[id].done = true;
    for (int e = nodes_[id].first_edge; e >= 0; e = edges_[e].next) decrement(edges_[e].to);
  }

  void complete_node(int id) {
    const Node& node = nodes_[id];
    Value result = fold(id);
    locations_[locate(node.rank, node.step->chunk)].value = result;
    rounds_ = std::max(rounds_, result.rounds);
    if (collective_ == Collective::barrier) note_received(ranks_[node.rank], result.plain);
    for (std::size_t t = 0; t < node.step->operands.size(); ++t)
      if (const int message = messages_[node.partner + t]; message >= 0) finish(message);
    finish(id);
  }

  Value fold(int id) {
    const Step& step = *nodes_[id].step;
    std::vector<Value> terms;
    for (std::size_t t = 0; t < step.operands.size(); ++t) {
      const int message = messages_[nodes_[id].partner + t];
      Value term =
          message >= 0 ? fetch(message, nodes_[message].step->chunk) : fetch(id, step.operands[t].chunk);
      if (message >= 0) nodes_[message].sent = term, ++term.rounds;
      if (term.finished && (step.final || step.operands.size() > 1))
        refuse(where(id, step.chunk.number), "a finished result is reduced again");
      if (const bool sum = !expressions_.is_leaf(term.plain); traits(collective_).reduces &&
                                                              sum != step.operands[t].partial &&
                                                              (step.final || step.operands.size() > 1))
        refuse(where(id, step.chunk.number), "operand ", t,
               sum ? " is a sum, but not marked as one"
                   : " is marked as a sum, but is the contribution of one rank");
      terms.push_back(term);
    }
    Value sum =
        combine(std::move(terms), step.order, [&](const Value& a, const Value& b) { return add(id, a, b); });
    if (step.final) sum.exact = expressions_.finished(sum.exact);
    if (step.final || step.operands.size() > 1) sum.exact = expressions_.stored(sum.exact);
    sum.finished |= step.final;
    return sum;
  }

  /// The terms in that order; there is at least one.
  template <class T, class Add>
  static T combine(std::vector<T> terms, ReductionOrder order, const Add& add) {
    if (order == ReductionOrder::rank) {
      T sum = terms[0];
      for (std::size_t t = 1; t < terms.size(); ++t) sum = add(sum, terms[t]);
      return sum;
    }
    while (terms.size() > 1) {
      std::vector<T> pairs;
      for (std::size_t t = 0; t < terms.size(); t += 2)
        pairs.push_back(t + 1 < terms.size() ? add(terms[t], terms[t + 1]) : terms[t]);
      terms = std::move(pairs);
    }
    return terms[0];
  }

  Value add(int id, const Value& a, const Value& b) {
    if (traits(collective_).reduces)
      if (const int twice = expressions_.common_rank(a.plain, b.plain); twice >= 0)
        refuse(where(id, a.chunk), "the contribution of rank ", twice, " would count twice");
    return {expressions_.sum(a.exact, b.exact), expressions_.sum(a.plain, b.plain), a.chunk,
            std::max(a.rounds, b.rounds), false};
  }

  const Value& fetch(int id, ChunkRef ref) const {
    const Value& value = locations_[locate(nodes_[id].rank, ref)].value;
    if (value.chunk < 0) refuse(where(id, ref.number), "is read before it was written");
    if (value.chunk != ref.number) refuse(where(id, ref.number), "its cell holds chunk ", value.chunk);
    return value;
  }

  // --- Checks at the end ---

  /// All sends, rank by rank, in program order.
  std::vector<int> sends() const {
    std::vector<int> all;
    for (int id = 0; id < static_cast<int>(nodes_.size()); ++id)
      if (nodes_[id].step->kind == Step::send) all.push_back(id);
    return all;
  }

  void check_no_pending() const {
    for (int id = 0; id < static_cast<int>(nodes_.size()); ++id)
      if (!nodes_[id].done) fail_deadlock(id);
  }

  // A dependency of a deadlocked step that is deadlocked itself. There is always one, so following it finds a
  // cycle.
  int find_blocker(int id) const {
    const Node& node = nodes_[id];
    if (node.step->kind == Step::send && node.pending == 0) return node.partner;
    for (int before = 0; before < static_cast<int>(nodes_.size()); ++before)
      for (int e = nodes_[before].first_edge; e >= 0 && !nodes_[before].done; e = edges_[e].next)
        if (edges_[e].to == id) return before;
    for (std::size_t t = 0; t < node.step->operands.size(); ++t)
      if (const int m = messages_[node.partner + t]; m >= 0 && nodes_[m].pending > 0) return m;
    return id;
  }

  [[noreturn]] void fail_deadlock(int id) const {
    std::vector<int> cycle;
    for (; std::find(cycle.begin(), cycle.end(), id) == cycle.end(); id = find_blocker(id))
      cycle.push_back(id);
    cycle.erase(cycle.begin(), std::find(cycle.begin(), cycle.end(), id));
    cycle.push_back(id);
    std::string text = "deadlock: ";
    for (std::size_t i = 0; i < cycle.size() && i < 6; ++i) {
      const Node& node = nodes_[cycle[i]];
      text +=
          concat(i ? " waits for " : "", "rank ", node.rank, ", step ", node.index,
                 node.step->kind == Step::send ? concat(" (send to ", node.step->peer, ")") : std::string{},
                 ", chunk ", node.step->chunk.number);
    }
    refuse(text, cycle.size() > 6 ? " waits for …" : "");
  }

  void note_received(Rank& rank, SymbolicSums::Id value) {
    for (std::size_t w = 0; w < rank.received_from.size(); ++w)
      rank.received_from[w] |= expressions_.ranks(value)[w];
  }

  void check_all_contributions() const {
    for (int r = 0; r < size_; ++r)
      for (int other = 0; other < size_; ++other)
        if (!(ranks_[r].received_from[other / 64] >> other % 64 & 1))
          refuse("rank ", r, ", step ", ranks_[r].schedule.steps.size(),
                 ", chunk 0: leaves the barrier without rank ", other);
  }

  struct Order {
    bool by_rank = true, pairwise = true, rounded_once = true;
  };

  // Orders of summation over all elements.
  Order check_outputs() {
    std::vector<SymbolicSums::Id> exact(static_cast<std::size_t>(ranks_[0].schedule.chunks), -1),
        by_rank = exact, pairwise = exact;
    Order order;
    for (int r = 0; r < size_; ++r)
      for (int i = 0; i < ranks_[r].outputs.count; ++i) {
        const int chunk = ranks_[r].outputs[i];
        const Location& l = locations_[locate(r, output(chunk))];
        const std::string here =
            l.writer >= 0 ? where(l.writer, chunk) : concat("rank ", r, ", no step, chunk ", chunk, ": ");
        check_output(l.value, here);
        if (!traits(collective_).reduces) continue;
        if (exact[chunk] < 0) {
          exact[chunk] = l.value.exact;
          by_rank[chunk] = sum_in_order(chunk, ReductionOrder::rank);
          pairwise[chunk] = sum_in_order(chunk, ReductionOrder::pairwise);
        }
        if (exact[chunk] != l.value.exact)
          refuse(here, "is summed or rounded in another order than on a rank before");
        order.by_rank &= l.value.plain == by_rank[chunk];
        order.pairwise &= l.value.plain == pairwise[chunk];
        order.rounded_once &=
            is_rounded_once(l.value, by_rank[chunk]) || is_rounded_once(l.value, pairwise[chunk]);
      }
    results_ = std::move(exact);
    return order;
  }

  // Without a reduction a chunk has one source, and chunk numbers were compared at every step.
  void check_output(const Value& value, const std::string& here) const {
    if (value.chunk < 0) refuse(here, "the output is never written");
    if (!traits(collective_).reduces) return;
    if (const int missing = expressions_.missing_rank(value.plain); missing >= 0)
      refuse(here, "lacks the contribution of rank ", missing);
    if (!value.finished) refuse(here, "has passed no final step");
  }

  SymbolicSums::Id sum_in_order(int chunk, ReductionOrder order) {
    std::vector<SymbolicSums::Id> leaves;
    for (int r = 0; r < size_; ++r) leaves.push_back(expressions_.leaf(r, chunk));
    return combine(std::move(leaves), order,
                   [&](SymbolicSums::Id a, SymbolicSums::Id b) { return expressions_.sum(a, b); });
  }

  bool is_rounded_once(const Value& value, SymbolicSums::Id sum) {
    return value.exact == expressions_.stored(expressions_.finished(sum));
  }

  Case case_;
  Collective collective_;
  int size_;
  bool in_place_;
  SymbolicSums& expressions_;
  std::vector<Rank> ranks_;
  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  std::vector<Location> locations_;
  std::vector<Reader> readers_;
  std::vector<int> messages_;  // by operand: the send that it receives, or -1
  std::vector<int> ready_;
  std::vector<SymbolicSums::Id> results_;  // of a reduction, by chunk
  int rounds_ = 0;
};

void check_case(const Case& q, InPlace in_place) {
  const Collective c = q.collective;
  if (c == Collective::send || c == Collective::recv) refuse(name(c), " is no scheduled collective");
  if (q.size < 1 || q.root < 0 || q.root >= q.size)
    refuse("there is no group of ", q.size, " with root ", q.root);
  if (in_place != InPlace::none && (all_to_all(c) || c == Collective::barrier))
    refuse(name(c), " has no in-place form");
  if (!q.node_of_rank.empty() && q.node_of_rank.size() != static_cast<std::size_t>(q.size))
    refuse(q.node_of_rank.size(), " nodes are named for ", q.size, " ranks");
}

/// Merges the results of two runs that send the same messages.
Verification both(const Verification& a, const Verification& b) {
  return {.error = {},
          .rank_order = a.rank_order && b.rank_order,
          .pairwise_order = a.pairwise_order && b.pairwise_order,
          .rounded_once = a.rounded_once && b.rounded_once,
          .depth = std::max(a.depth, b.depth)};
}

Verification verify_apart(const Case& what, SymbolicSums& expressions, Verifier& as_written) {
  const Verification proof = as_written.prove();
  Verifier as_run(what, Memory::apart_without_copies, expressions);
  if (as_run.steps() == as_written.steps()) return proof;
  const Verification run = as_run.prove();
  as_run.compare(as_written, "without its copies");
  return both(proof, run);
}

Verification verify_case(const Case& what, InPlace in_place) {
  check_case(what, in_place);
  SymbolicSums expressions(what.size);
  if (in_place == InPlace::all) return Verifier(what, Memory::in_place, expressions).prove();
  Verifier apart(what, Memory::apart, expressions);
  const Verification proof = verify_apart(what, expressions, apart);
  if (in_place == InPlace::none) return proof;
  Verifier same(what, Memory::in_place, expressions);
  const Verification in = same.prove();
  same.compare(apart, "in place than out of place");
  return both(proof, in);
}

}  // namespace

Verification verify(ScheduleFunction function, Collective collective, int size, int root, InPlace in_place,
                    std::span<const int> node_of_rank, ReductionOrder order) {
  try {
    return verify_case({function, collective, size, root, node_of_rank, order}, in_place);
  } catch (const Refused& refused) {
    return {.error = refused.reason};
  } catch (const Error& error) {
    return {.error = error.what()};
  }
}

}  // namespace rz::schedule
