#pragma once
/// Our types and operators in MPI's words, for sums whose order MPI may choose.

#include <mpi.h>

#include <map>
#include <utility>

#include "comm/core/types.h"

namespace rz::mpi {

/// Elements of a reduction. Sums and products of signed integers are those of unsigned ones, which wrap.
/// Small floats are their bits, as only operators of ours know them.
MPI_Datatype datatype(DType, ReduceOp::Kind);

/// MPI's own operators where they mean what ours do; else operators over rz::reduce.
class Operators {
 public:
  Operators() = default;
  Operators(const Operators&) = delete;
  ~Operators();
  MPI_Op get(DType, ReduceOp::Kind);
  /// After a failure they may be in use for ever.
  void abandon() { created_.clear(); }

 private:
  std::map<std::pair<DType, ReduceOp::Kind>, MPI_Op> created_;
};

}  // namespace rz::mpi
