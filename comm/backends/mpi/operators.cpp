#include "comm/backends/mpi/operators.h"

#include <array>

#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/reduce/reduce.h"

namespace rz::mpi {

namespace {

bool is_min_or_max(ReduceOp::Kind k) { return k == ReduceOp::min || k == ReduceOp::max; }

// avg and premul_sum are sums for MPI: the input is scaled before, an average divided after.
ReduceOp::Kind as_sum(ReduceOp::Kind k) {
  return k == ReduceOp::avg || k == ReduceOp::premul_sum ? ReduceOp::sum : k;
}

bool is_signed(DType t) { return t == DType::i8 || t == DType::i32 || t == DType::i64; }

// Float min and max: rz::reduce propagates NaN, MPI does not specify it. Unsigned min and max: MPICH 4.0
// (issue 6083) and some Open MPI versions (issue 10525) compare them as signed. 8-bit integers: rz::reduce
// wraps, Open MPI 4.1's vector code saturates.
bool mpi_op_matches(DType t, ReduceOp::Kind k) {
  return size_of(t) >= 4 && (is_signed(t) || !is_min_or_max(k));
}

// An MPI operator function receives neither ringzero's dtype nor operator, so there is one function for each
// pair.
template <int which>
void reduce_callback(void* in, void* in_out, int* count, MPI_Datatype*) {
  constexpr auto dtype = static_cast<DType>(which % dtype_count);
  constexpr auto kind = static_cast<ReduceOp::Kind>(which / dtype_count);
  const void* sources[] = {in, in_out};
  reduce(in_out, sources, static_cast<std::size_t>(*count), dtype, kind);
}

template <int... which>
constexpr auto make_reduce_functions(std::integer_sequence<int, which...>) {
  return std::array{&reduce_callback<which>...};
}
constexpr auto reduce_functions =
    make_reduce_functions(std::make_integer_sequence<int, dtype_count*(ReduceOp::max + 1)>());

}  // namespace

MPI_Datatype datatype(DType t, ReduceOp::Kind k) {
  switch (t) {
    case DType::f32:
      return MPI_FLOAT;
    case DType::f64:
      return MPI_DOUBLE;
    case DType::i8:
      return is_min_or_max(k) ? MPI_INT8_T : MPI_UINT8_T;
    case DType::i32:
      return is_min_or_max(k) ? MPI_INT32_T : MPI_UINT32_T;
    case DType::i64:
      return is_min_or_max(k) ? MPI_INT64_T : MPI_UINT64_T;
    case DType::u32:
      return MPI_UINT32_T;
    case DType::u64:
      return MPI_UINT64_T;
    case DType::f16:
    case DType::bf16:
      return MPI_UINT16_T;
    default:
      return MPI_UINT8_T;
  }
}

void Operators::free() {
  int finalised = 0;
  if (MPI_Finalized(&finalised) != MPI_SUCCESS || finalised) return;
  for (auto& [key, op] : created_) MPI_Op_free(&op);
  created_.clear();
}

MPI_Op Operators::get(DType t, ReduceOp::Kind kind) {
  const ReduceOp::Kind k = as_sum(kind);
  if (mpi_op_matches(t, k))
    return k == ReduceOp::sum    ? MPI_SUM
           : k == ReduceOp::prod ? MPI_PROD
           : k == ReduceOp::min  ? MPI_MIN
                                 : MPI_MAX;
  const auto [it, is_new] = created_.try_emplace({t, k}, MPI_OP_NULL);
  if (is_new) {
    const auto which = static_cast<std::size_t>(k) * dtype_count + static_cast<std::size_t>(t);
    check(MPI_Op_create(reduce_functions[which], 1, &it->second), "MPI_Op_create");
  }
  return it->second;
}

}  // namespace rz::mpi
