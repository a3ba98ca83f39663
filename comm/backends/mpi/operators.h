#pragma once
/// MPI datatypes and operators for reductions in the order that MPI chooses.

#include <mpi.h>

#include <map>
#include <utility>

#include "comm/core/types.h"

namespace rz::mpi {

/// Datatype of a reduction. Sums and products of signed integers use the unsigned type, which wraps. Small
/// floats are passed as their bits, since only operators created here reduce them.
MPI_Datatype datatype(DType, ReduceOp::Kind);

/// Provides MPI's built-in operators where they match ringzero's semantics; otherwise operators that call
/// rz::reduce.
class Operators {
 public:
  Operators() = default;
  Operators(const Operators&) = delete;
  ~Operators() { free(); }
  MPI_Op get(DType, ReduceOp::Kind);
  /// Frees the created operators, unless MPI was finalised.
  void free();
  /// Leaks the created operators: after a failure MPI may still use them.
  void abandon() { created_.clear(); }

 private:
  std::map<std::pair<DType, ReduceOp::Kind>, MPI_Op> created_;
};

}  // namespace rz::mpi
