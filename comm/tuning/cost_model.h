#pragma once
/// What an algorithm costs, estimated from its schedule, where nobody has measured it. The model is that of
/// LogGP with the overhead of a message for its latency (Alexandrov et al. 1995, doi:10.1145/215399.215427):
/// a rank sends one message after the other, each for alpha + beta a byte, then it has arrived; a combination
/// waits for all that it needs and takes gamma for each byte that it reads. Slices, which overlap, are left
/// out: what has many rounds is estimated too dear.

#include <cstddef>
#include <vector>

#include "comm/tuning/tuning.h"

namespace rz {

/// What lies on the path that ends last.
struct ScheduleCost {
  double messages = 0;  ///< that are sent one after the other
  double bytes = 0;     ///< of them
  double read = 0;      ///< bytes that combinations read

  double microseconds(const LinkCost& c) const {
    return c.alpha * messages + c.beta * bytes + c.gamma * read;
  }
};

/// The largest group that is estimated: its schedules are gone through step by step.
inline constexpr int max_modelled_ranks = 64;

/// Of `bytes`, the larger of a rank's input and output, with root 0. Monotone in bytes.
ScheduleCost estimate(const Algorithm&, int size, std::size_t bytes, const LinkCost&);

/// A table's lines, and behind them lines for this group of what they do not hold: what measured groups, a
/// smaller and a larger one, agree on; else what costs least by the model, if the table has the link.
std::vector<TuningRule> rules_for(const Tuning&, int size, bool deterministic);

}  // namespace rz
