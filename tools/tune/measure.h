#pragma once
/// How long each algorithm of a collective takes, on the ranks of this job.

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/tuning/tuning.h"
#include "tools/tune/options.h"

namespace rz::tune {

/// What competes: a name of the table, at a place. `direct` is of memory from allocate(), all else of any.
struct Candidate {
  Collective collective;
  TuningScope where;
  std::string name;

  bool is_zero_copy() const { return where == TuningScope::intra_node_registered; }
};

/// What competes on a group; `intra_node`: in shared memory. Of a collective without a choice nothing does.
std::vector<Candidate> candidates(bool intra_node, const Options&);

/// A candidate's median of one size, of the rank that took longest.
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

/// Told how far it is, from 0 to 1, and what is measured.
using Progress = std::function<void(double done, const std::string& what)>;

/// Called by every rank of a group of at least two, which meet in the store; the result is the same on all.
Measured measure(int rank, int size, const std::shared_ptr<Store>&, const Options&, const Progress&);

}  // namespace rz::tune
