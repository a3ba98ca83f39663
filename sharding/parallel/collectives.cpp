#include "sharding/parallel/collectives.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include "autograd_lite/nn/image_layers.h"
#include "comm/core/error.h"
#include "sharding/parallel/communication_meter.h"
#include "tensor/ops.h"
#include "tensor/shape_ops.h"

namespace rz::functional {

namespace {

std::size_t ranks_of(const Communicator& c) { return static_cast<std::size_t>(c.size()); }

/// Elements of one index of the first dimension.
std::size_t row_of(const Tensor& x, const char* call) {
  require(x.shape().dims() > 0, Errc::invalid_argument, call, ": the input is a scalar; give it a dimension");
  std::size_t row = 1;
  for (int d = 1; d < x.shape().dims(); ++d) row *= x.shape()[d];
  return row;
}

Shape with_rows(const Shape& shape, std::size_t rows) {
  std::vector<std::size_t> extents{rows};
  for (int d = 1; d < shape.dims(); ++d) extents.push_back(shape[d]);
  return Shape(extents);
}

/// Rows sent to and received from each rank.
struct Exchange {
  std::vector<std::size_t> send, receive;
};

Tensor exchanged(Tape& tape, const Tensor& x, const Exchange& rows, std::size_t row, Communicator& c) {
  const auto elements = [&](const std::vector<std::size_t>& list) {
    std::vector<std::size_t> counts;
    for (const std::size_t n : list) counts.push_back(n * row);
    return counts;
  };
  const auto offsets = [](const std::vector<std::size_t>& counts) {
    std::vector<std::size_t> starts(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), std::size_t{0});
    return starts;
  };
  const auto sent = elements(rows.send), received = elements(rows.receive);
  const std::size_t total = std::accumulate(rows.receive.begin(), rows.receive.end(), std::size_t{0});
  const Tensor out = tape.empty(with_rows(x.shape(), total), x.dtype());
  c.all_to_all_v(x.buffer(), sent, offsets(sent), out.buffer(), received, offsets(received), tape.stream())
      .wait_on(tape.stream());
  return out;
}

Tensor reduced(Tape& tape, const Tensor& x, const CountedGroup& c, ReduceOp op) {
  const Tensor out = tape.empty(x.shape(), x.dtype());
  run_counted(
      c, Collective::all_reduce, x.bytes(), tape.stream(),
      [&] { return c.communicator->all_reduce(x.buffer(), out.buffer(), op, tape.stream()); }, 1,
      [&] { tape.run_deferred(); });
  return out;
}

}  // namespace

Var all_reduce(Tape& tape, Var x, const CountedGroup& c, ReduceOp op) {
  require(op.kind == ReduceOp::sum || op.kind == ReduceOp::avg, Errc::unsupported,
          "functional::all_reduce: only sum and avg have an adjoint that is a collective");
  return tape.record(reduced(tape, tape.value(x), c, op), {x},
                     [x, op, c](Tape& t, const Tensor& d) { t.accumulate_grad(x, reduced(t, d, c, op)); });
}

namespace {

/// Starts call(communicator or group, elements of x, elements of out) for each index of the dimensions before
/// this one, all as one group, and waits.
template <class F>
void each_block(Tape& tape, const CountedGroup& c, Collective kind, const Tensor& x, const Tensor& out,
                int dimension, const F& call) {
  std::size_t blocks = 1;
  for (int d = 0; d < dimension; ++d) blocks *= x.shape()[d];
  if (blocks == 0) return;
  const std::size_t in = x.count() / blocks, to = out.count() / blocks;
  const auto start = [&]() -> Work {
    if (blocks == 1) return call(*c.communicator, x.buffer(), out.buffer());
    Group group = c.communicator->group();
    for (std::size_t b = 0; b < blocks; ++b)
      call(group, x.view(b * in, {in}).buffer(), out.view(b * to, {to}).buffer());
    return group.launch();
  };
  run_counted(c, kind, std::max(x.bytes(), out.bytes()) / blocks, tape.stream(), start, blocks,
              [&] { tape.run_deferred(); });
}

Tensor gathered(Tape& tape, const Tensor& x, const CountedGroup& c, int given) {
  const int dimension = ops::dimension("functional::all_gather", x.shape(), given);
  const Tensor out =
      tape.empty(x.shape().with(dimension, x.shape()[dimension] * ranks_of(*c.communicator)), x.dtype());
  each_block(tape, c, Collective::all_gather, x, out, dimension,
             [&](auto& to, const ConstBuffer& part, const Buffer& whole) -> decltype(auto) {
               return to.all_gather(part, whole, tape.stream());
             });
  return out;
}

Tensor scattered(Tape& tape, const Tensor& x, const CountedGroup& c, int given) {
  const int dimension = ops::dimension("functional::reduce_scatter", x.shape(), given);
  const std::size_t ranks = ranks_of(*c.communicator);
  if (x.shape()[dimension] % ranks != 0)
    fail(Errc::invalid_argument, "functional::reduce_scatter: dimension ", dimension, " of ", name(x.shape()),
         " cannot be divided evenly over ", ranks, " ranks");
  const Tensor out = tape.empty(x.shape().with(dimension, x.shape()[dimension] / ranks), x.dtype());
  each_block(tape, c, Collective::reduce_scatter, x, out, dimension,
             [&](auto& to, const ConstBuffer& whole, const Buffer& part) -> decltype(auto) {
               return to.reduce_scatter(whole, part, ReduceOp::sum, tape.stream());
             });
  return out;
}

}  // namespace

Var all_gather(Tape& tape, Var x, const CountedGroup& c, int dimension) {
  const Var out = tape.record(
      gathered(tape, tape.value(x), c, dimension), {x},
      [x, c, dimension](Tape& t, const Tensor& d) { t.accumulate_grad(x, scattered(t, d, c, dimension)); });
  if (c.overlaps) tape.mark_overlaps(out);
  return out;
}

Var reduce_scatter(Tape& tape, Var x, const CountedGroup& c, int dimension) {
  return tape.record(
      scattered(tape, tape.value(x), c, dimension), {x},
      [x, c, dimension](Tape& t, const Tensor& d) { t.accumulate_grad(x, gathered(t, d, c, dimension)); });
}

Var replicate(Tape& tape, Var x, const CountedGroup& c) {
  const Var out = tape.record(tape.value(x), {x}, [x, c](Tape& t, const Tensor& d) {
    t.accumulate_grad(x, reduced(t, d, c, ReduceOp::sum));
  });
  if (c.overlaps) tape.mark_overlaps(out);
  if (tape.is_parameter_memory(x)) tape.mark_view(out, x);
  return out;
}

Var combine(Tape& tape, Var x, const CountedGroup& c) {
  return tape.record(reduced(tape, tape.value(x), c, ReduceOp::sum), {x},
                     [x](Tape& t, const Tensor& d) { t.accumulate_grad(x, d); });
}

Tensor gather(Tape& tape, const Tensor& x, const CountedGroup& c) {
  const auto dims = static_cast<std::size_t>(x.shape().dims());
  std::array<std::size_t, 4> extents{ranks_of(*c.communicator)};
  for (std::size_t d = 0; d < dims; ++d) extents[d + 1] = x.shape()[static_cast<int>(d)];
  const Tensor out = tape.empty(Shape(std::span<const std::size_t>(extents.data(), dims + 1)), x.dtype());
  run_counted(
      c, Collective::all_gather, out.bytes(), tape.stream(),
      [&] { return c.communicator->all_gather(x.buffer(), out.buffer(), tape.stream()); }, 1, [] {});
  return out;
}

Var broadcast(Tape& tape, Var x, int root, Communicator& c) {
  const Tensor in = tape.value(x), out = tape.empty(in.shape(), in.dtype());
  c.broadcast(in.buffer(), out.buffer(), root, tape.stream()).wait_on(tape.stream());
  return tape.record(out, {x}, [x, root, &c](Tape& t, const Tensor& d) {
    const Tensor sum = t.empty(d.shape(), d.dtype());
    c.reduce(d.buffer(), sum.buffer(), root, ReduceOp::sum, t.stream()).wait_on(t.stream());
    if (c.rank() != root) ops::fill(sum, 0, t.stream());
    t.accumulate_grad(x, sum);
  });
}

Var all_to_all(Tape& tape, Var x, std::vector<std::size_t> send_rows, std::vector<std::size_t> recv_rows,
               Communicator& c) {
  const Tensor in = tape.value(x);
  const std::size_t row = row_of(in, "functional::all_to_all");
  const std::size_t sent = std::accumulate(send_rows.begin(), send_rows.end(), std::size_t{0});
  require(send_rows.size() == ranks_of(c) && recv_rows.size() == ranks_of(c), Errc::invalid_argument,
          "functional::all_to_all: ", send_rows.size(), " and ", recv_rows.size(), " splits for ", c.size(),
          " ranks; give one per rank");
  require(sent == in.shape()[0], Errc::invalid_argument, "functional::all_to_all: ", sent,
          " rows are sent, but the input has ", in.shape()[0]);
  const Exchange there{std::move(send_rows), std::move(recv_rows)};
  const Tensor out = exchanged(tape, in, there, row, c);
  return tape.record(out, {x},
                     [x, row, back = Exchange{there.receive, there.send}, &c](Tape& t, const Tensor& d) {
                       t.accumulate_grad(x, exchanged(t, d, back, row, c));
                     });
}

void sync_batch_norm(Module& module, Communicator& c) {
  for (Module* m : module.modules())
    if (auto* const norm = dynamic_cast<nn::BatchNorm2d*>(m))
      norm->sum_over_ranks = [&c](const Tensor& sums, const Stream& stream) {
        c.all_reduce(sums.buffer(), ReduceOp::sum, stream).wait_on(stream);
      };
}

}  // namespace rz::functional
