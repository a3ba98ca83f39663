// Checks of the operators that move elements, and their layouts.

#include "tensor/shape_ops.h"

#include <algorithm>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"

namespace rz::ops {

namespace {

/// Whether the shapes have one number of extents, which are equal except that of a dimension.
bool alike_except(const Shape& a, const Shape& b, int dimension) {
  if (a.dims() != b.dims()) return false;
  for (int d = 0; d < a.dims(); ++d)
    if (d != dimension && a[d] != b[d]) return false;
  return true;
}

bool may_move(const Tensor& a, const Tensor& b, Into into) {
  return a.dtype() == b.dtype() && (into == Into::overwrite || is_float(a.dtype()));
}

/// Copies all of `part` to or from its place in `whole`. `fills`: as one of parts that fill it.
void move_part(const char* op, const Tensor& whole, const Tensor& part, int dimension, std::size_t start,
               bool to_whole, Into into, const Stream& stream, bool fills = false) {
  IndexMap place = layout_of(whole);
  const IndexMap all = layout_of(part);
  const std::size_t at = start * place.stride[dimension];
  std::copy_n(all.extent, 4, place.extent);
  if (to_whole)
    strided_copy(op, whole, part, {place, all, at, 0, fills}, into, stream);
  else
    strided_copy(op, part, whole, {all, place, 0, at}, into, stream);
}

std::string listed(std::span<const int> order) {
  std::string text = "{";
  for (std::size_t i = 0; i < order.size(); ++i) text += concat(i ? ", " : "", order[i]);
  return text + "}";
}

/// The order from 0.
std::array<int, 4> permutation(const Shape& shape, std::span<const int> order) {
  std::array<int, 4> from{};
  std::array<bool, 4> used{};
  bool valid = order.size() == static_cast<std::size_t>(shape.dims());
  for (std::size_t d = 0; valid && d < order.size(); ++d) {
    from[d] = order[d] < 0 ? order[d] + shape.dims() : order[d];
    valid = from[d] >= 0 && from[d] < shape.dims() && !used[static_cast<std::size_t>(from[d])];
    if (valid) used[static_cast<std::size_t>(from[d])] = true;
  }
  if (!valid)
    fail(Errc::invalid_argument, "permute: ", listed(order), " is no order of the dimensions of ",
         name(shape));
  return from;
}

/// A part of a dimension of `whole`, as the operators narrow.
int narrowed(const char* op, const Argument& whole, const Argument& part, int given, std::size_t start,
             Into into) {
  const Shape &all = whole.tensor.shape(), &own = part.tensor.shape();
  const int d = dimension(op, all, given);
  check(op, {whole, part}, alike_except(all, own, d) && may_move(whole.tensor, part.tensor, into),
        Rows::any_stride, DTypes::any);
  if (start > all[d] || own[d] > all[d] - start)
    fail(Errc::invalid_argument, op, ": ", start, " to ", start + own[d], " is outside of dimension ", d,
         " of ", whole.name, " ", name(all));
  return d;
}

}  // namespace

int dimension(const char* op, const Shape& shape, int dimension) {
  const int dims = shape.dims(), d = dimension < 0 ? dimension + dims : dimension;
  if (d < 0 || d >= dims)
    fail(Errc::invalid_argument, op, ": the tensor ", name(shape), " has no extent ", dimension);
  return d;
}

Shape permuted(const Shape& shape, std::span<const int> order) {
  const std::array<int, 4> from = permutation(shape, order);
  Shape out = shape;
  for (int d = 0; d < shape.dims(); ++d) out = out.with(d, shape[from[static_cast<std::size_t>(d)]]);
  return out;
}

void permute(const Tensor& out, const Tensor& in, std::span<const int> order, Into into,
             const Stream& stream) {
  const std::array<int, 4> from = permutation(in.shape(), order);
  const IndexMap given = layout_of(in);
  StridedCopy copy{layout_of(out), given};
  for (int d = 0; d < given.dims; ++d) {
    const int f = from[static_cast<std::size_t>(d)];
    copy.in.extent[d] = given.extent[f], copy.in.stride[d] = given.stride[f];
  }
  check("permute", {{"out", out}, {"in", in}},
        out.shape() == permuted(in.shape(), order) && may_move(out, in, into), Rows::any_stride, DTypes::any);
  strided_copy("permute", out, in, copy, into, stream);
}

void cat(const Tensor& out, std::span<const Tensor> parts, int given, const Stream& stream) {
  require(!parts.empty(), Errc::invalid_argument, "cat: there is no part");
  const int d = dimension("cat", out.shape(), given);
  std::size_t length = 0;
  bool fits = true;
  for (const Tensor& part : parts) {
    fits = fits && alike_except(out.shape(), part.shape(), d) && may_move(out, part, Into::overwrite);
    length += d < part.shape().dims() ? part.shape()[d] : 0;
  }
  if (!fits || length != out.shape()[d]) {
    std::string all;
    for (const Tensor& part : parts) all += concat(", part ", name(part.shape()), " of ", name(part.dtype()));
    fail(Errc::invalid_argument, "cat: these do not fit together along dimension ", d, ": out ",
         name(out.shape()), " of ", name(out.dtype()), all);
  }
  std::size_t start = 0;
  for (const Tensor& part : parts) {
    check("cat", {{"out", out}, {"part", part}}, true, Rows::any_stride, DTypes::any);
    move_part("cat", out, part, d, start, true, Into::overwrite, stream, /*fills=*/true);
    start += part.shape()[d];
  }
}

void narrow(const Tensor& out, const Tensor& in, int given, std::size_t start, Into into,
            const Stream& stream) {
  const int d = narrowed("narrow", {"in", in}, {"out", out}, given, start, into);
  move_part("narrow", in, out, d, start, false, into, stream);
}

void narrow_backward(const Tensor& d_in, const Tensor& d_out, int given, std::size_t start, Into into,
                     const Stream& stream) {
  constexpr const char* op = "narrow_backward";
  const int d = narrowed(op, {"d_in", d_in}, {"d_out", d_out}, given, start, Into::accumulate);
  if (into == Into::overwrite && d_out.shape()[d] != d_in.shape()[d]) fill(d_in, 0, stream);
  move_part(op, d_in, d_out, d, start, true, into, stream);
}

void slice_scatter(const Tensor& out, const Tensor& part, int given, std::size_t start,
                   const Stream& stream) {
  const int d = narrowed("slice_scatter", {"out", out}, {"part", part}, given, start, Into::overwrite);
  move_part("slice_scatter", out, part, d, start, true, Into::overwrite, stream);
}

}  // namespace rz::ops
