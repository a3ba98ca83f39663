// Times the losses of tensor/loss_ops.h and the cross entropy of tensor/ops.h on the host:
//
//   losses_bench ROWS CLASSES THREADS DTYPE CALLS
//
// Prints a line per loss: its name, and the medians of forward and backward in ms.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "comm/core/error.h"
#include "tensor/loss_ops.h"

namespace {

using rz::DType;
using rz::Stream;
using rz::Tensor;

struct Problem {
  std::size_t rows, classes;
  int calls;
  Stream stream;
  Tensor logits, teacher, gradient, targets;
  Tensor loss = Tensor::empty({}), sums = Tensor::empty({2}, DType::f64), factor = Tensor::empty({});
  Tensor losses = Tensor::empty({rows}), log_sum = Tensor::empty({rows}),
         statistics = Tensor::empty({rows, 2});
};

/// Logits from -4 to 4.
Tensor values(std::size_t rows, std::size_t classes, DType dtype, double seed, const Stream& stream) {
  const Tensor f32 = Tensor::empty({rows, classes}), t = Tensor::empty({rows, classes}, dtype);
  for (std::size_t i = 0; i < f32.count(); ++i)
    f32.data<float>()[i] = static_cast<float>(4 * std::sin(seed * static_cast<double>(i % 100003)));
  rz::ops::copy(t, f32, stream);
  return t;
}

Problem problem_of(char** argv) {
  const auto number = [&](int i) { return std::strtoul(argv[i], nullptr, 10); };
  const DType dtype = rz::dtype_from_name(argv[4]);
  const Stream stream = Stream::host(static_cast<int>(number(3)));
  const std::size_t rows = number(1), classes = number(2);
  Problem p{rows,
            classes,
            static_cast<int>(number(5)),
            stream,
            values(rows, classes, dtype, 12.9898, stream),
            values(rows, classes, dtype, 78.233, stream),
            Tensor::empty({rows, classes}, dtype),
            Tensor::empty({rows}, DType::i32)};
  for (std::size_t r = 0; r < rows; ++r)
    p.targets.data<std::int32_t>()[r] = static_cast<std::int32_t>(r * 7919 % classes);
  *p.factor.data<float>() = 1;
  return p;
}

double median_ms(int calls, const std::function<void()>& call) {
  std::vector<double> ms;
  call();
  for (int i = 0; i < calls; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(ms.begin(), ms.begin() + calls / 2, ms.end());
  return ms[static_cast<std::size_t>(calls) / 2];
}

void time_loss(const char* name, const Problem& p, const std::function<void()>& forward,
               const std::function<void()>& backward) {
  const double forward_ms = median_ms(p.calls, forward), backward_ms = median_ms(p.calls, backward);
  std::printf("%-20s %9.3f %9.3f\n", name, forward_ms, backward_ms);
}

void time_labels(const char* name, const Problem& p, float smoothing) {
  const rz::ops::LabelLoss how{.label_smoothing = smoothing};
  time_loss(
      name, p,
      [&] { rz::ops::label_loss(p.loss, p.sums, p.losses, p.log_sum, p.logits, p.targets, how, p.stream); },
      [&] {
        rz::ops::label_loss_backward(p.gradient, p.logits, p.log_sum, p.targets, p.factor, how, p.stream);
      });
}

void time_soft(const char* name, const Problem& p, const Tensor& targets, const rz::ops::SoftLoss& how) {
  time_loss(
      name, p,
      [&] { rz::ops::soft_loss(p.loss, p.sums, p.losses, p.statistics, p.logits, targets, how, p.stream); },
      [&] {
        rz::ops::soft_loss_backward(p.gradient, p.logits, targets, p.statistics, p.factor, how, p.stream);
      });
}

void time_elements(const char* name, const Problem& p, rz::ops::ElementLoss how) {
  time_loss(
      name, p, [&] { rz::ops::element_loss(p.loss, p.sums, p.logits, p.teacher, how, p.stream); },
      [&] {
        rz::ops::element_loss_backward(p.gradient, p.factor, p.logits, p.teacher, how,
                                       rz::ops::Into::overwrite, p.stream);
      });
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 6) return std::fprintf(stderr, "losses_bench ROWS CLASSES THREADS DTYPE CALLS\n"), 2;
  const Problem p = problem_of(argv);
  time_loss(
      "cross_entropy", p,
      [&] { rz::ops::cross_entropy(p.loss, p.sums, p.losses, p.log_sum, p.logits, p.targets, p.stream); },
      [&] {
        rz::ops::cross_entropy_backward(p.gradient, p.logits, p.log_sum, p.targets, p.factor, p.stream);
      });
  time_labels("label", p, 0);
  time_labels("label_smoothing", p, 0.1f);
  time_soft("kl_div", p, p.teacher, {.targets = rz::ops::SoftLoss::logits, .temperature = 2});
  const Tensor probabilities = Tensor::empty({p.rows, p.classes}, p.logits.dtype());
  rz::ops::softmax(probabilities, p.teacher, p.stream);
  time_soft("kl_div_probabilities", p, probabilities, {});
  time_soft("soft_targets", p, probabilities, {.divergence = false});
  time_elements("squared_error", p, rz::ops::ElementLoss::squared_error);
  time_elements("binary_cross_entropy", p, rz::ops::ElementLoss::binary_cross_entropy);
  time_loss(
      "accuracy", p, [&] { rz::ops::accuracy(p.sums, p.logits, p.targets, -100, p.stream); }, [] {});
} catch (const std::exception& e) {
  std::fprintf(stderr, "losses_bench: %s\n", rz::one_line(e).c_str());
  return 1;
}
