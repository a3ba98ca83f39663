#pragma once
/// Operators that move elements, with PyTorch's names and the rules of tensor/ops.h. Tensors may have row
/// strides, except those of index_select, and the few elements of gather. With Into::overwrite permute, cat,
/// narrow and slice_scatter copy elements of any dtype; elsewhere f32, f16 or bf16 is required. An output
/// overlaps no input.
///
/// A dimension is an index of an extent; a negative one counts from the last. Errc::invalid_argument names
/// operator and shape if there is none.

#include <span>

#include "../comm/device/stream.h"
#include "element_ops.h"
#include "tensor.h"

namespace rz::ops {

/// The dimension from 0. Errc::invalid_argument names `op` and the shape.
int dimension(const char* op, const Shape&, int dimension);

/// The shape whose extent d is extent order[d]. Errc::invalid_argument unless the order has each dimension
/// once.
Shape permuted(const Shape&, std::span<const int> order);
/// out has the elements of in with its dimensions in this order, and the shape permuted().
void permute(const Tensor& out, const Tensor& in, std::span<const int> order, Into, const Stream&);
/// out = the parts, one after the other along a dimension. All other extents are equal.
void cat(const Tensor& out, std::span<const Tensor> parts, int dimension, const Stream&);
/// out = in[…, start : start + length, …]; the length is the extent of out.
void narrow(const Tensor& out, const Tensor& in, int dimension, std::size_t start, Into, const Stream&);
/// d_in[…, start : start + length, …] = d_out, and 0 elsewhere; or += d_out, which leaves other elements as
/// they are.
void narrow_backward(const Tensor& d_in, const Tensor& d_out, int dimension, std::size_t start, Into,
                     const Stream&);
/// out[…, start : start + length, …] = part; other elements stay as they are.
void slice_scatter(const Tensor& out, const Tensor& part, int dimension, std::size_t start, const Stream&);

/// out[n…] = in[index[n…]]: rows, elements or blocks of the first dimension; index is i32. It is embedding()
/// of any shape, with the same errors and results for an index out of range.
void index_select(const Tensor& out, const Tensor& in, const Tensor& index, const Stream&);
/// Adds in the order of the indices; a 16-bit result is rounded as in embedding_backward().
void index_select_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& index, Into, const Stream&);

/// out[n…] = in[n…, index[n…]]: one element of each row. On the host, Errc::invalid_argument names the first
/// index out of range. On a device the element of such an index becomes NaN, and its gradient is dropped.
void gather(const Tensor& out, const Tensor& in, const Tensor& index, const Stream&);
void gather_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& index, Into, const Stream&);

}  // namespace rz::ops
