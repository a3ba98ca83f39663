#pragma once
/// Measures how long each algorithm of a collective takes on the ranks of this job.

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/tuning/tuning.h"
#include "tools/tune/options.h"

namespace rz::tune {

/// An algorithm of a tuning table, in a scope. `zero_copy` applies to memory from allocate(), all others to
/// any memory.
struct Candidate {
  Collective collective;
  tuning::Scope scope;
  std::string name;

  bool is_zero_copy() const { return scope == tuning::Scope::intra_node_registered; }
};

/// The candidates for a group; `intra_node`: in shared memory. A collective without alternatives has none.
std::vector<Candidate> candidates(bool intra_node, const Options&);

/// The median time of a candidate at one size, on the slowest rank.
struct Time {
  Candidate candidate;
  std::size_t bytes;  ///< of the whole buffer
  double us;
};

struct Measured {
  int ranks = 0;
  bool intra_node = false;
  std::string backend;  ///< "native over shm"
  std::vector<Time> times;
};

/// Called with the progress from 0 to 1, and a description of the current measurement.
using Progress = std::function<void(double done, const std::string& what)>;

/// Collective over a group of at least two ranks, which rendezvous through the store. The result is equal on
/// all ranks.
Measured measure(int rank, int size, const std::shared_ptr<Store>&, const Options&, const Progress&);

/// Rules for groups of the measured size: for each range of sizes the fastest algorithm, and the fastest that
/// sums in rank order if that is another one. A range ends where the times of two algorithms cross,
/// interpolated between measured sizes. Small advantages, and those at a single size, are ignored as noise.
tuning::Table make_table(const Measured&);

/// Header comment of a table: where, when and how it was measured.
std::string header(const Measured&, const Options&);

}  // namespace rz::tune
