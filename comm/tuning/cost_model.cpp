#include "comm/tuning/cost_model.h"

#include <algorithm>
#include <map>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

std::size_t chunk_bytes(Collective c, const Schedule& schedule, int size, std::size_t bytes) {
  const bool even = c == Collective::all_reduce || c == Collective::broadcast || c == Collective::reduce;
  const std::size_t parts = static_cast<std::size_t>(even ? schedule.chunks : size);
  return ceil_div(bytes, parts);
}

/// Simulates the schedules of all ranks; each advances until it waits for a message.
class CriticalPath {
 public:
  CriticalPath(const Algorithm& algorithm, int size) : collective_(algorithm.collective), size_(size) {
    for (int r = 0; r < size; ++r) ranks_.push_back({algorithm.schedule({r, size, 0})});
    wires_.resize(ranks_.size() * ranks_.size());
  }

  ScheduleCost last(std::size_t bytes, const LinkCost& link) {
    link_ = link;
    chunk_ = static_cast<double>(chunk_bytes(collective_, ranks_[0].schedule, size_, bytes));
    for (Rank& r : ranks_) r.next = 0, r.clock = {};
    for (Wire& w : wires_) w.messages.clear(), w.received = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < size_; ++r)
        while (step(r)) moved = true;
    }
    for (const Rank& r : ranks_)
      require(r.next == r.schedule.steps.size(), Errc::unsupported,
              "a schedule's steps do not end one after the other");
    const auto later = [&](const Rank& a, const Rank& b) {
      return a.clock.microseconds(link_) < b.clock.microseconds(link_);
    };
    return std::max_element(ranks_.begin(), ranks_.end(), later)->clock;
  }

 private:
  struct Rank {
    Schedule schedule;
    std::size_t next = 0;
    ScheduleCost clock;
  };
  // Messages in flight, each with the critical path of its arrival.
  struct Wire {
    std::vector<ScheduleCost> messages;
    std::size_t received = 0;
    bool empty() const { return received == messages.size(); }
  };
  Wire& wire(int from, int to) { return wires_[static_cast<std::size_t>(from * size_ + to)]; }

  bool step(int r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    if (rank.next == rank.schedule.steps.size()) return false;
    const Step& s = rank.schedule.steps[rank.next];
    if (s.kind == Step::send) {
      // Consecutive chunks for one peer count as one message.
      const Step* const before = rank.next ? &s - 1 : nullptr;
      const bool begins = !before || before->kind != Step::send || before->peer != s.peer;
      rank.clock.messages += begins, rank.clock.bytes += chunk_;
      wire(r, s.peer).messages.push_back(rank.clock);
    } else {
      for (const Operand& t : s.operands)
        if (t.peer >= 0 && wire(t.peer, r).empty()) return false;
      for (const Operand& t : s.operands)
        if (t.peer >= 0) receive(rank, wire(t.peer, r));
      rank.clock.read += chunk_ * static_cast<double>(s.operands.size());
    }
    ++rank.next;
    return true;
  }

  void receive(Rank& rank, Wire& from) const {
    const ScheduleCost& at = from.messages[from.received++];
    if (at.microseconds(link_) > rank.clock.microseconds(link_)) rank.clock = at;
  }

  const Collective collective_;
  const int size_;
  LinkCost link_;
  double chunk_ = 0;
  std::vector<Rank> ranks_;
  std::vector<Wire> wires_;
};

/// Makes rules for calls of one collective in one scope that a table does not cover.
class RuleInterpolator {
 public:
  RuleInterpolator(const Tuning& tuning, TuningScope where, Collective c, int size, bool deterministic)
      : rules_(tuning.rules),
        link_(where == TuningScope::intra_node ? tuning.shm : tuning.tcp),
        where_(where),
        collective_(c),
        size_(size),
        deterministic_(deterministic) {
    for (const TuningRule& r : rules_) {
      if (r.collective != c || r.scope != where || r.max_ranks != r.min_ranks) continue;
      if (r.max_ranks < size) below_ = std::max(below_, r.max_ranks);
      if (r.max_ranks > size) above_ = std::min(above_, r.max_ranks);
    }
  }

  /// A rule for calls of more than `lower` and up to `upper` bytes, chosen for calls of `like` bytes.
  /// Nullopt: the table has one, or there is neither a measurement nor a link.
  std::optional<TuningRule> line(std::size_t lower, std::size_t upper, std::size_t like) {
    const auto held = [&](std::size_t bytes) {
      return find_rule(rules_, {collective_, where_, bytes, size_}, deterministic_) != nullptr;
    };
    if (held(lower + 1) && held(upper)) return std::nullopt;
    std::vector<TuningRule> candidates;
    if (below_ > 0 && above_ < any_size)
      for (const int measured : {below_, above_})
        if (const auto* r = find_rule(rules_, {collective_, where_, like, measured}, deterministic_))
          candidates.push_back(*r);
    Source source = Source::model;
    if (candidates.size() == 2 && candidates[0].is_schedule == candidates[1].is_schedule &&
        std::string_view(candidates[0].algorithm) == candidates[1].algorithm) {
      source = Source::interpolated;
      candidates.pop_back();
    } else if (!link_) {
      return std::nullopt;
    } else if (candidates.size() < 2) {
      candidates = all();
    }
    if (candidates.empty()) return std::nullopt;
    TuningRule best = *std::min_element(
        candidates.begin(), candidates.end(),
        [&](const auto& a, const auto& b) { return candidates.size() > 1 && cost(a, like) < cost(b, like); });
    best.max_ranks = best.min_ranks = size_;
    best.min_bytes = lower, best.max_bytes = upper, best.max_traffic = any_bytes;
    best.source = source;
    return best;
  }

 private:
  /// All candidates. Intra-node, only algorithms of the engine, which cost less than the same as a schedule.
  std::vector<TuningRule> all() const {
    std::vector<TuningRule> found;
    for (const Algorithm& a : algorithms()) {
      TuningRule rule{collective_, where_, ""};
      if (a.collective != collective_ || a.is(hierarchical) || !set_algorithm(rule, a.name) ||
          rule.is_schedule)
        continue;
      if (!find_rule({&rule, 1}, {collective_, where_, 0, size_}, deterministic_))
        continue;  // not in rank order
      found.push_back(rule);
    }
    return found;
  }

  double cost(const TuningRule& r, std::size_t bytes) {
    const Algorithm& algorithm = find_algorithm(collective_, r.algorithm);
    return walks_.try_emplace(&algorithm, algorithm, size_)
        .first->second.last(bytes, *link_)
        .microseconds(*link_);
  }

  const std::vector<TuningRule>& rules_;
  const std::optional<LinkCost> link_;
  const TuningScope where_;
  const Collective collective_;
  const int size_;
  const bool deterministic_;
  int below_ = 0, above_ = any_size;
  std::map<const Algorithm*, CriticalPath> walks_;
};

bool has_alternatives(Collective c, TuningScope where) {
  return algorithm_choices(c, where).find(", ") != std::string::npos &&
         (where != TuningScope::intra_node || c == Collective::all_reduce);
}

}  // namespace

ScheduleCost estimate(const Algorithm& algorithm, int size, std::size_t bytes, const LinkCost& link) {
  return CriticalPath(algorithm, size).last(bytes, link);
}

std::vector<TuningRule> rules_for(const Tuning& tuning, int size, bool deterministic) {
  std::vector<TuningRule> rules = tuning.rules;
  if (tuning.empty() || size < 2 || size > max_modelled_ranks) return rules;
  constexpr std::size_t first = 64, last = std::size_t{256} << 20;
  for (const TuningScope where : {TuningScope::intra_node, TuningScope::inter_node})
    for (int i = 0; i < collective_count; ++i) {
      const Collective c{static_cast<std::uint8_t>(i)};
      if (!has_alternatives(c, where)) continue;
      RuleInterpolator filler(tuning, where, c, size, deterministic);
      std::size_t lower = 0;
      for (std::size_t upper = first; lower < last; lower = upper, upper *= 4) {
        const bool ends = upper >= last;
        const auto line = filler.line(lower, ends ? any_bytes : upper, ends ? last : upper / 2);
        if (line) rules.push_back(*line);
      }
    }
  return rules;
}

}  // namespace rz
