#pragma once
/// The operators of tensor/shape_ops.h on a tape, with PyTorch's names. A dimension is an index of an extent;
/// a negative one counts from the last. Errc::invalid_argument names operator and shape if there is none.
/// They copy, except reshape() and flatten(): a tensor has no other views. They compute in the
/// dtype of their inputs; with Tape::autocast() parts of different dtypes are cast to f32, as with
/// torch.autocast.

#include <initializer_list>
#include <span>
#include <vector>

#include "tape.h"

namespace rz::nn {

/// The same memory with another shape.
Var reshape(Tape&, Var x, const Shape&);
/// Extent d of the result is extent order[d] of x.
Var permute(Tape&, Var x, std::initializer_list<int> order);
/// x with two dimensions exchanged.
Var transpose(Tape&, Var x, int a, int b);

/// The parts, one after the other along a dimension. All other extents are equal.
Var cat(Tape&, std::span<const Var> parts, int dimension);
inline Var cat(Tape& tape, std::initializer_list<Var> parts, int dimension) {
  return cat(tape, std::span<const Var>(parts.begin(), parts.size()), dimension);
}
/// Parts of these lengths, which fill the dimension.
std::vector<Var> split(Tape&, Var x, std::span<const std::size_t> lengths, int dimension);
inline std::vector<Var> split(Tape& tape, Var x, std::initializer_list<std::size_t> lengths, int dimension) {
  return split(tape, x, std::span<const std::size_t>(lengths.begin(), lengths.size()), dimension);
}
/// x[…, start : start + length, …]
Var narrow(Tape&, Var x, int dimension, std::size_t start, std::size_t length);

/// x[…, index, …] without that dimension.
Var select(Tape&, Var x, int dimension, std::size_t index);
/// Dimensions `first` to `last` as one, in the same memory.
Var flatten(Tape&, Var x, int first = 0, int last = -1);

/// index: i32 [n…]; x[C, …] → [n…, …], the elements x[index[n…]] of the first dimension.
Var index_select(Tape&, Var x, const Tensor& index);
/// index: i32 [n…]; x[n…, C] → [n…], one element of each row.
Var gather(Tape&, Var x, const Tensor& index);

}  // namespace rz::nn
