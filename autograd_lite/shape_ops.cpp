#include "autograd_lite/shape_ops.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "autograd_lite/element_ops.h"
#include "autograd_lite/saved_variable.h"
#include "tensor/ops.h"
#include "tensor/shape_ops.h"

namespace rz::nn {
namespace {

using Order = std::array<int, 4>;

std::span<const int> first(const Order& order, int dims) {
  return {order.data(), static_cast<std::size_t>(dims)};
}

/// The shape with one extent, or none, in place of those from `begin` to `end`.
Shape with_range(const Shape& shape, int begin, int end, std::optional<std::size_t> extent) {
  std::vector<std::size_t> all;
  for (int d = 0; d < shape.dims(); ++d) {
    if (d < begin || d > end) all.push_back(shape[d]);
    if (d == begin && extent) all.push_back(*extent);
  }
  return Shape(all);
}

Var permute_by(Tape& tape, const char* op, Var x, std::span<const int> order) {
  const Tensor& in = tape.value(x);
  const Shape before = in.shape(), after = ops::permuted(before, order);
  Order inverse{};
  for (int d = 0; d < after.dims(); ++d)
    inverse[static_cast<std::size_t>(ops::dimension(op, before, order[static_cast<std::size_t>(d)]))] = d;
  const Tensor out = tape.empty(after, in.dtype());
  ops::permute(out, in, order, ops::Into::overwrite, tape.stream());
  return tape.record(out, {x}, [x, inverse, dims = after.dims()](Tape& tape, const Tensor& d_out) {
    const auto d_x = tape.grad_target(x);
    ops::permute(d_x.tensor, tape.converted_for(d_x, d_out), first(inverse, dims), into(d_x), tape.stream());
  });
}

/// Adds the gradient of a part, in its place, to that of the whole; stores it if that is not begun, where an
/// undefined one is 0.
void put_part(Tape& tape, const Tape::GradTarget& d_x, Tensor d_part, int dimension, std::size_t start,
              std::size_t length) {
  if (d_x.accumulate) {
    if (d_part.defined())
      ops::narrow_backward(d_x.tensor, tape.converted_for(d_x, d_part), dimension, start,
                           ops::Into::accumulate, tape.stream());
    return;
  }
  if (length == 0) return;
  if (!d_part.defined()) {
    d_part = tape.empty(d_x.tensor.shape().with(dimension, length), d_x.tensor.dtype());
    ops::fill(d_part, 0, tape.stream());
  }
  ops::slice_scatter(d_x.tensor, tape.converted_for(d_x, d_part), dimension, start, tape.stream());
}

/// Backward of split(), by the last part that has a gradient: d_part, which ends at `end` of the dimension.
/// The `count` parts before it were recorded one after the other, up to `before`: their gradients are
/// complete.
void join_parts(Tape& tape, Var x, int dimension, Var before, std::size_t count, std::size_t end,
                const Tensor& d_part) {
  const auto d_x = tape.grad_target(x);
  put_part(tape, d_x, {}, dimension, end, d_x.tensor.shape()[dimension] - end);
  std::size_t length = d_part.shape()[dimension], start = end - length;
  put_part(tape, d_x, d_part, dimension, start, length);
  for (; count > 0; --count, --before.index) {
    length = tape.value(before).shape()[dimension], start -= length;
    put_part(tape, d_x, tape.take_grad(before), dimension, start, length);
  }
}

/// The extents of the index, then those of the input without its first.
Shape selected(const Shape& index, const Shape& in) {
  std::array<std::size_t, 4> all{};
  const int leading = index.dims(), dims = leading + in.dims() - 1;
  if (dims > 4)
    fail(Errc::invalid_argument, "index_select: the result of an index ", name(index), " in ", name(in),
         " would have ", dims, " extents, at most 4 are supported");
  for (int d = 0; d < dims; ++d)
    all[static_cast<std::size_t>(d)] = d < leading ? index[d] : in[d - leading + 1];
  return Shape(std::span<const std::size_t>(all.data(), static_cast<std::size_t>(dims)));
}

}  // namespace

Var reshape(Tape& tape, Var x, const Shape& shape) {
  const Shape before = tape.value(x).shape();
  const Var out = tape.record(
      tape.value(x).reshape(shape), {x},
      [x, before](Tape& tape, const Tensor& d_out) { tape.accumulate_grad(x, d_out.reshape(before)); });
  if (tape.is_parameter_memory(x)) tape.mark_view(out, x);
  return out;
}

Var permute(Tape& tape, Var x, std::initializer_list<int> order) {
  return permute_by(tape, "permute", x, std::span<const int>(order.begin(), order.size()));
}

Var transpose(Tape& tape, Var x, int a, int b) {
  const Shape shape = tape.value(x).shape();
  Order order{0, 1, 2, 3};
  std::swap(order[static_cast<std::size_t>(ops::dimension("transpose", shape, a))],
            order[static_cast<std::size_t>(ops::dimension("transpose", shape, b))]);
  return permute_by(tape, "transpose", x, first(order, shape.dims()));
}

Var cat(Tape& tape, std::span<const Var> parts, int given) {
  require(!parts.empty(), Errc::invalid_argument, "cat: there is no part");
  const Shape first = tape.value(parts[0]).shape();
  const int dimension = ops::dimension("cat", first, given);
  std::vector<Var> alike(parts.begin(), parts.end());
  const DType dtype = tape.value(parts[0]).dtype();
  if (!std::ranges::all_of(parts, [&](Var part) { return tape.value(part).dtype() == dtype; }))
    for (Var& part : alike) part = autocast_wide(tape, part);
  std::vector<Tensor> tensors;
  std::size_t length = 0;
  for (const Var part : alike) {
    tensors.push_back(tape.value(part));
    const Shape& shape = tensors.back().shape();
    length += dimension < shape.dims() ? shape[dimension] : 0;
  }
  const Tensor out = tape.empty(first.with(dimension, length), tensors[0].dtype());
  ops::cat(out, tensors, dimension, tape.stream());
  return tape.record(out, std::span<const Var>(alike),
                     [dimension](Tape& tape, const Tensor& d_out, std::span<const Var> parts) {
                       std::size_t start = 0;
                       for (const Var part : parts) {
                         const std::size_t length = tape.value(part).shape()[dimension];
                         if (const auto d = tape.grad_target(part); d.tensor.defined()) {
                           ops::narrow(d.tensor, tape.converted_for(d, d_out), dimension, start, into(d),
                                       tape.stream());
                         }
                         start += length;
                       }
                     });
}

Var narrow(Tape& tape, Var x, int given, std::size_t start, std::size_t length) {
  const Tensor& in = tape.value(x);
  const int dimension = ops::dimension("narrow", in.shape(), given);
  const Tensor out = tape.empty(in.shape().with(dimension, length), in.dtype());
  ops::narrow(out, in, dimension, start, ops::Into::overwrite, tape.stream());
  return tape.record(out, {x}, [x, dimension, start](Tape& tape, const Tensor& d_out) {
    const auto d_x = tape.grad_target(x);
    ops::narrow_backward(d_x.tensor, tape.converted_for(d_x, d_out), dimension, start, into(d_x),
                         tape.stream());
  });
}

std::vector<Var> split(Tape& tape, Var x, std::span<const std::size_t> lengths, int dimension) {
  const Shape shape = tape.value(x).shape();
  const int d = ops::dimension("split", shape, dimension);
  const std::size_t extent = shape[d];
  const std::size_t all = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
  if (all != extent)
    fail(Errc::invalid_argument, "split: the lengths of ", lengths.size(), " parts are ", all,
         " together, and dimension ", dimension, " of ", name(shape), " is ", extent);
  std::vector<Var> parts;
  std::size_t start = 0;
  for (const std::size_t length : lengths) {
    const Tensor part = tape.empty(shape.with(d, length), tape.value(x).dtype());
    ops::narrow(part, tape.value(x), d, start, ops::Into::overwrite, tape.stream());
    start += length;
    const Var before = parts.empty() ? Var() : parts.back();
    parts.push_back(tape.record(
        part, {x}, [x, d, before, count = parts.size(), end = start](Tape& tape, const Tensor& d_part) {
          join_parts(tape, x, d, before, count, end, d_part);
        }));
  }
  return parts;
}

Var select(Tape& tape, Var x, int given, std::size_t index) {
  const Shape shape = tape.value(x).shape();
  const int dimension = ops::dimension("select", shape, given);
  require(index < shape[dimension], Errc::invalid_argument, "select: index ", index, " of dimension ", given,
          " of ", name(shape));
  return reshape(tape, narrow(tape, x, dimension, index, 1), with_range(shape, dimension, dimension, {}));
}

Var flatten(Tape& tape, Var x, int first, int last) {
  const Shape shape = tape.value(x).shape();
  if (shape.dims() == 0) return reshape(tape, x, {1});
  const int begin = ops::dimension("flatten", shape, first), end = ops::dimension("flatten", shape, last);
  require(begin <= end, Errc::invalid_argument, "flatten: dimension ", first, " of ", name(shape),
          " is after dimension ", last);
  std::size_t count = 1;
  for (int d = begin; d <= end; ++d) count *= shape[d];
  return reshape(tape, x, with_range(shape, begin, end, count));
}

Var index_select(Tape& tape, Var x, const Tensor& index) {
  const Tensor& in = tape.value(x);
  ops::dimension("index_select", in.shape(), 0);
  const Tensor out = tape.empty(selected(index.shape(), in.shape()), in.dtype());
  ops::index_select(out, in, index, tape.stream());
  return tape.record(out, {x}, [x, index](Tape& tape, const Tensor& d_out) {
    const auto d_x = tape.grad_target(x);
    ops::index_select_backward(d_x.tensor, d_out, index, into(d_x), tape.stream());
  });
}

Var gather(Tape& tape, Var x, const Tensor& index) {
  const Tensor out = tape.empty(index.shape(), tape.value(x).dtype());
  ops::gather(out, tape.value(x), index, tape.stream());
  return tape.record(out, {x}, [x, index](Tape& tape, const Tensor& d_out) {
    const auto d_x = tape.grad_target(x);
    ops::gather_backward(d_x.tensor, tape.converted_for(d_x, d_out), index, into(d_x), tape.stream());
  });
}

}  // namespace rz::nn
