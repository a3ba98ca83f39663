#pragma once
/// Cost model: estimates the time of an algorithm from its schedule, for calls without a measured rule. It is
/// LogGP (Alexandrov et al. 1995, doi:10.1145/215399.215427) with one parameter alpha for latency and
/// overhead. A rank sends one message after the other; each takes alpha + beta per byte and has then arrived.
/// A reduction waits for all its operands and takes gamma per byte that it reads. Pipelining by slices is not
/// modelled, so algorithms of many rounds are overestimated.

#include <cstddef>
#include <vector>

#include "comm/tuning/tuning.h"

namespace rz {

/// The critical path of a schedule.
struct ScheduleCost {
  double messages = 0;
  double bytes = 0;  ///< of these messages
  double read = 0;   ///< bytes that reductions read

  double microseconds(const LinkCost& c) const {
    return c.alpha * messages + c.beta * bytes + c.gamma * read;
  }
};

/// The largest group size that is estimated: the schedules of all ranks are simulated step by step.
inline constexpr int max_modelled_ranks = 64;

/// Cost of a call of `bytes`, the larger of a rank's input and output, with root 0. Monotone in bytes.
ScheduleCost estimate(const Algorithm&, int size, std::size_t bytes, const LinkCost&);

/// The table's rules, followed by rules for this group size where none matches: the algorithm on which the
/// next smaller and the next larger measured group agree; else the cheapest one by the model, if the table
/// has the link.
std::vector<TuningRule> rules_for(const Tuning&, int size, bool deterministic);

}  // namespace rz
