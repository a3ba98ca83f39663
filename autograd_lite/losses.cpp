#include "autograd_lite/losses.h"

#include <algorithm>
#include <cmath>

#include "autograd_lite/element_ops.h"
#include "autograd_lite/saved_variable.h"
#include "comm/core/integer_math.h"
#include "tensor/ops.h"

namespace rz::nn {
namespace {

/// Logits as a matrix with a row a distribution.
Tensor as_rows(const Tensor& t) {
  const std::size_t columns = t.shape().dims() ? t.shape()[-1] : 1;
  return t.reshape({t.count() / std::max<std::size_t>(1, columns), columns});
}

void require_same_shape(const char* op, const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape())
    fail(Errc::invalid_argument, op, ": the targets are ", name(b.shape()), ", expected ", name(a.shape()));
}

Tensor in_dtype(Tape& tape, const Tensor& t, DType dtype) {
  return t.dtype() == dtype ? t : tape.value(cast(tape, tape.constant(t), dtype));
}

Loss soft(Tape& tape, Var logits_var, const Tensor& targets, const ops::SoftLoss& how) {
  const Tensor logits = as_rows(tape.value(logits_var));
  const std::size_t n = logits.shape()[0];
  const Tensor y = as_rows(targets.dtype() == logits.dtype() ? targets : in_dtype(tape, targets, DType::f32));
  const Tensor loss = tape.empty({}), sums = tape.empty({2}, DType::f64), losses = tape.empty({n}),
               statistics = tape.empty({n, 2});
  ops::soft_loss(loss, sums, losses, statistics, logits, y, how, tape.stream());
  const Shape shape = tape.value(logits_var).shape();
  return {tape.record(loss, {logits_var},
                      [logits_var, logits, y, statistics, how, shape](Tape& tape, const Tensor& d_loss) {
                        const Tensor d = tape.empty(logits.shape(), logits.dtype());
                        ops::soft_loss_backward(d, logits, y, statistics, d_loss, how, tape.stream());
                        tape.accumulate_grad(logits_var, d.reshape(shape));
                      }),
          sums};
}

Tape& tape_of(const Loss& loss) {
  require(loss.sum.defined() && loss.sum.tape, Errc::invalid_argument,
          "a sum or multiple of a loss that stands for no value: set nn::Loss::sum");
  return *loss.sum.tape;
}

Loss of_elements(Tape& tape, const char* op, Var given, const Tensor& targets, ops::ElementLoss how) {
  const Var x_var = autocast_wide(tape, given);
  const Tensor x = tape.value(x_var), y = in_dtype(tape, targets, x.dtype());
  require_same_shape(op, x, y);
  const Tensor loss = tape.empty({}), sums = tape.empty({2}, DType::f64);
  ops::element_loss(loss, sums, x, y, how, tape.stream());
  return {tape.record(loss, {x_var},
                      [x_var, x, y, how](Tape& tape, const Tensor& d_loss) {
                        with_grad_target(tape, x_var, x.dtype(), [&](const Tape::GradTarget& d) {
                          ops::element_loss_backward(d.tensor, d_loss, x, y, how, into(d), tape.stream());
                        });
                      }),
          sums};
}

}  // namespace

Loss kl_div(Tape& tape, Var logits, const Tensor& targets, ops::SoftLoss how) {
  require_same_shape("kl_div", tape.value(logits), targets);
  require(how.divergence, Errc::invalid_argument,
          "kl_div: SoftLoss::divergence is false: call cross_entropy()");
  return soft(tape, logits, targets, how);
}

Loss cross_entropy(Tape& tape, Var logits, const Tensor& probabilities, float temperature) {
  require_same_shape("cross_entropy", tape.value(logits), probabilities);
  return soft(tape, logits, probabilities, {.divergence = false, .temperature = temperature});
}

Loss cross_entropy(Tape& tape, Var logits_var, const Tensor& targets, ops::LabelLoss how) {
  const Shape shape = tape.value(logits_var).shape();
  const Tensor logits = as_rows(tape.value(logits_var));
  const std::size_t n = logits.shape()[0];
  const Tensor ids = targets.reshape({targets.count()});
  const Tensor loss = tape.empty({}), sums = tape.empty({2}, DType::f64), losses = tape.empty({n}),
               log_sum = tape.empty({n});
  ops::label_loss(loss, sums, losses, log_sum, logits, ids, how, tape.stream());
  return {tape.record(loss, {logits_var},
                      [logits_var, logits, ids, log_sum, how, shape](Tape& tape, const Tensor& d_loss) {
                        const Tensor d = tape.empty(logits.shape(), logits.dtype());
                        ops::label_loss_backward(d, logits, log_sum, ids, d_loss, how, tape.stream());
                        tape.accumulate_grad(logits_var, d.reshape(shape));
                      }),
          sums};
}

Loss cross_entropy(Tape& tape, Var logits_var, const Tensor& targets, const ClassPart& of) {
  const Shape shape = tape.value(logits_var).shape();
  const Tensor logits = as_rows(tape.value(logits_var));
  const std::size_t n = logits.shape()[0];
  const Tensor own = tape.empty({n}, DType::i32), statistics = tape.empty({n, 2}), losses = tape.empty({n}),
               log_sum = tape.empty({n}), loss = tape.empty({}), sums = tape.empty({2}, DType::f64);
  ops::local_indices(own, targets.reshape({n}), of.first, logits.shape()[1], of.total, tape.stream());
  ops::cross_entropy_part(statistics, logits, own, tape.stream());
  ops::cross_entropy_of_parts(loss, sums, losses, log_sum, of.gather(tape, statistics), own, tape.stream());
  return {tape.record(loss, {logits_var},
                      [logits_var, shape, kept = SavedVariable(tape, logits_var), log_sum, own](
                          Tape& tape, const Tensor& d_loss) {
                        const bool overwrite = tape.can_reuse(logits_var);  // before a further reference
                        const Tensor logits = as_rows(kept(tape));
                        const Tensor d = overwrite ? logits : empty_like(tape, logits);
                        ops::cross_entropy_backward(d, logits, log_sum, own, d_loss, tape.stream());
                        tape.accumulate_grad(logits_var, d.reshape(shape));
                      }),
          sums};
}

Var gather_classes(Tape& tape, Var part_var, const ClassPart& of) {
  const Shape shape = tape.value(part_var).shape();
  const Tensor part = as_rows(tape.value(part_var));
  const std::size_t n = part.shape()[0], own = part.shape()[1],
                    share = ceil_div(of.total, static_cast<std::size_t>(of.ranks));
  const Tensor sent = tape.empty({n, share}, part.dtype()), out = tape.empty({n, of.total}, part.dtype());
  if (own < share) ops::fill(sent, 0, tape.stream());
  ops::copy(sent.columns(0, own), part, tape.stream());
  const Tensor all = of.gather(tape, sent);
  for (std::size_t r = 0; r < static_cast<std::size_t>(of.ranks); ++r) {
    const std::size_t width = std::min(share, of.total - std::min(of.total, r * share));
    if (width == 0) continue;
    ops::copy(out.columns(r * share, width), all.view(r * n * share, {n, share}).columns(0, width),
              tape.stream());
  }
  return tape.record(out.reshape(shape.with_last(of.total)), {part_var},
                     [part_var, shape, first = of.first, own](Tape& tape, const Tensor& d_out) {
                       const Tensor d = tape.empty(shape, d_out.dtype());
                       ops::copy(as_rows(d), as_rows(d_out).columns(first, own), tape.stream());
                       tape.accumulate_grad(part_var, d);
                     });
}

Loss squared_error(Tape& tape, Var prediction, const Tensor& target) {
  return of_elements(tape, "squared_error", prediction, target, ops::ElementLoss::squared_error);
}

Loss binary_cross_entropy_with_logits(Tape& tape, Var logits, const Tensor& targets) {
  return of_elements(tape, "binary_cross_entropy_with_logits", logits, targets,
                     ops::ElementLoss::binary_cross_entropy);
}

namespace {

Loss plus_scalar(Tape& tape, const Loss& a, Var given) {
  const DType dtype = tape.value(given).dtype();
  const Var b = dtype == DType::f32 ? given : cast(tape, given, DType::f32);
  require(tape.value(b).count() == 1, Errc::invalid_argument, "a loss plus a tensor of shape ",
          name(tape.value(b).shape()), ": expected a scalar");
  const Tensor loss = tape.empty({}), sums = tape.empty({2}, DType::f64), terms = tape.empty({});
  ops::add_scalar(loss, sums, terms, a.sum_count, tape.value(b), tape.stream());
  return {tape.record(loss, {a.sum, b},
                      [a = a.sum, b, terms, shape = tape.value(b).shape()](Tape& tape, const Tensor& d_loss) {
                        tape.accumulate_grad(a, d_loss);
                        const Tensor d_b = tape.empty({});
                        ops::binary(d_b, d_loss, terms, ops::Binary::mul, tape.stream());
                        tape.accumulate_grad(b, d_b.reshape(shape));
                      }),
          sums};
}

}  // namespace

Loss operator+(const Loss& a, const Loss& b) {
  Tape& tape = tape_of(a);
  require(&tape_of(b) == &tape, Errc::invalid_argument, "a sum of losses of two tapes: record both on one");
  if (!a.has_terms() && !b.has_terms()) return a.sum + b.sum;
  if (!a.has_terms() || !b.has_terms())
    return a.has_terms() ? plus_scalar(tape, a, b.sum) : plus_scalar(tape, b, a.sum);
  const Tensor loss = tape.empty({}), sums = tape.empty({2}, DType::f64), ratio = tape.empty({});
  ops::add_losses(loss, sums, ratio, a.sum_count, b.sum_count, tape.stream());
  return {tape.record(loss, {a.sum, b.sum},
                      [a = a.sum, b = b.sum, ratio](Tape& tape, const Tensor& d_loss) {
                        tape.accumulate_grad(a, d_loss);
                        const Tensor d_b = tape.empty({});
                        ops::binary(d_b, d_loss, ratio, ops::Binary::mul, tape.stream());
                        tape.accumulate_grad(b, d_b);
                      }),
          sums};
}

Loss operator*(double factor, const Loss& a) {
  Tape& tape = tape_of(a);
  require(std::isfinite(factor), Errc::invalid_argument, "a loss times ", factor,
          ": expected a finite factor");
  if (!a.has_terms()) return a.sum * static_cast<float>(factor);
  const Tensor loss = tape.empty({}), sums = tape.empty({2}, DType::f64);
  ops::scale_loss(loss, sums, a.sum_count, factor, tape.stream());
  return {tape.record(loss, {a.sum},
                      [a = a.sum, factor](Tape& tape, const Tensor& d_loss) {
                        const Tensor d = tape.empty({});
                        ops::scale(d, d_loss, static_cast<float>(factor), tape.stream());
                        tape.accumulate_grad(a, d);
                      }),
          sums};
}

Tensor accuracy(Tape& tape, Var logits, const Tensor& targets, std::int32_t ignore_index) {
  const Tensor counts = tape.empty({2}, DType::f64);
  ops::accuracy(counts, as_rows(tape.value(logits)), targets.reshape({targets.count()}), ignore_index,
                tape.stream());
  return counts;
}

}  // namespace rz::nn
