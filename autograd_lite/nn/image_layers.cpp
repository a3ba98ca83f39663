#include "autograd_lite/nn/image_layers.h"

#include <cmath>

#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"

namespace rz::nn {

Conv2d::Conv2d(Module& parent, const std::string& name, std::size_t in, std::size_t out, ops::Size2 kernel,
               const ops::Conv2d& options, bool with_bias)
    : Module(parent, name), options(options), with_bias(with_bias) {
  require(options.groups > 0 && in % options.groups == 0 && out % options.groups == 0, Errc::invalid_argument,
          path(), ": ", in, " and ", out, " channels do not divide into ", options.groups, " groups");
  const std::size_t terms = in / options.groups * kernel.h * kernel.w;
  require(terms > 0, Errc::invalid_argument, path(), ": the kernel has no elements");
  const Initial initial{Initial::uniform, static_cast<float>(1 / std::sqrt(static_cast<double>(terms)))};
  register_parameter(weight, "weight", {out, in / options.groups, kernel.h, kernel.w}, initial);
  if (with_bias) register_parameter(bias, "bias", {out}, initial);
}

Var Conv2d::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return conv2d(tape, x, w, with_bias ? tape.parameter(bias) : Var(), options);
  });
}

Var Conv2d::operator()(Tape& tape, const Tensor& x) {
  return in_scope(tape, [&] { return (*this)(tape, constant_like(tape, x, weight, *this)); });
}

BatchNorm2d::BatchNorm2d(Module& parent, const std::string& name, std::size_t channels,
                         const BatchNormOptions& options, int min_extents, int max_extents)
    : Module(parent, name), options(options), min_extents_(min_extents), max_extents_(max_extents) {
  register_parameter(weight, "weight", {channels}, {Initial::constant, 1});
  register_parameter(bias, "bias", {channels}, {Initial::constant, 0});
  register_buffer(running_mean, "running_mean", {channels});
  register_buffer(running_var, "running_var", {channels}, DType::f32, 1);
  register_buffer(num_batches_tracked, "num_batches_tracked", {}, DType::i64);
}

Var BatchNorm2d::operator()(Tape& tape, Var x) {
  const Shape& shape = tape.value(x).shape();
  require(shape.dims() >= min_extents_ && shape.dims() <= max_extents_, Errc::invalid_argument, path(),
          ": its input ", rz::name(shape), " has ", shape.dims(), " extents, expected ", min_extents_,
          min_extents_ == max_extents_ ? "" : concat(" to ", max_extents_));
  require(running_mean.value.defined(), Errc::invalid_argument, path(),
          ": its buffers have no memory; call allocate_buffers()");
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return batch_norm(tape, x, w, tape.parameter(bias),
                      {.running = {.mean = running_mean.value,
                                   .variance = running_var.value,
                                   .batches = num_batches_tracked.value,
                                   .momentum = options.momentum.value_or(-1)},
                       .training = training(),
                       .epsilon = options.epsilon,
                       .sum_over_ranks = sum_over_ranks});
  });
}

GroupNorm::GroupNorm(Module& parent, const std::string& name, std::size_t groups, std::size_t channels,
                     float epsilon)
    : Module(parent, name), groups(groups), epsilon(epsilon) {
  require(groups > 0 && channels % groups == 0, Errc::invalid_argument, path(), ": ", channels,
          " channels do not divide into ", groups, " groups");
  register_parameter(weight, "weight", {channels}, {Initial::constant, 1});
  register_parameter(bias, "bias", {channels}, {Initial::constant, 0});
}

Var GroupNorm::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return group_norm(tape, x, groups, w, tape.parameter(bias), epsilon);
  });
}

}  // namespace rz::nn
