#pragma once
/// Layers of convolutional networks, as those of autograd_lite/nn/layers.h: images are [N, C, H, W].

#include <optional>
#include <string>

#include "../image_ops.h"
#include "module.h"

namespace rz::nn {

/// Parameters `name`.weight [out, in / groups, kh, kw] and `name`.bias, initialized like PyTorch's nn.Conv2d:
/// uniform in ±1/sqrt(in / groups · kh · kw).
struct Conv2d : Module {
  Conv2d(Module& parent, const std::string& name, std::size_t in, std::size_t out, ops::Size2 kernel,
         const ops::Conv2d& options = {}, bool with_bias = true);
  Var operator()(Tape&, Var x);
  Var operator()(Tape&, const Tensor& x);  ///< constant_like() (autograd_lite/nn/layers.h)

  ops::Conv2d options;
  bool with_bias;
  Parameter weight;
  Parameter bias;  ///< not registered without a bias
};

struct MaxPool2d : Module {
  MaxPool2d(Module& parent, const std::string& name, const ops::Pool2d& pool)
      : Module(parent, name), pool(pool) {}
  Var operator()(Tape& tape, Var x) const { return max_pool2d(tape, x, pool); }

  ops::Pool2d pool;
};

struct AvgPool2d : Module {
  AvgPool2d(Module& parent, const std::string& name, const ops::Pool2d& pool)
      : Module(parent, name), pool(pool) {}
  Var operator()(Tape& tape, Var x) const { return avg_pool2d(tape, x, pool); }

  ops::Pool2d pool;
};

struct AdaptiveAvgPool2d : Module {
  AdaptiveAvgPool2d(Module& parent, const std::string& name, ops::Size2 size)
      : Module(parent, name), size(size) {}
  Var operator()(Tape& tape, Var x) const { return adaptive_avg_pool2d(tape, x, size); }

  ops::Size2 size;
};

struct BatchNormOptions {
  float epsilon = 1e-5f;
  std::optional<float> momentum = 0.1f;  ///< weight of a new batch; none: the mean of all batches
};

/// Parameters `name`.weight, initialized to 1, and `name`.bias, to 0; buffers `name`.running_mean,
/// `name`.running_var and `name`.num_batches_tracked. In training (Module::train()) the statistics are those
/// of the batch, which the buffers follow; in evaluation those of the buffers.
struct BatchNorm2d : Module {
  BatchNorm2d(Module& parent, const std::string& name, std::size_t channels,
              const BatchNormOptions& options = {})
      : BatchNorm2d(parent, name, channels, options, 4, 4) {}
  /// Errc::invalid_argument names the layer unless x has the extents that its name states.
  Var operator()(Tape&, Var x);

  BatchNormOptions options;
  /// Empty: statistics of this rank's batch. functional::sync_batch_norm() sets it.
  SumOverRanks sum_over_ranks;
  Parameter weight, bias;
  ModuleBuffer running_mean, running_var, num_batches_tracked;

 protected:
  BatchNorm2d(Module& parent, const std::string& name, std::size_t channels, const BatchNormOptions&,
              int min_extents, int max_extents);

 private:
  int min_extents_, max_extents_;
};

/// The same of x[N, C] or [N, C, L].
struct BatchNorm1d : BatchNorm2d {
  BatchNorm1d(Module& parent, const std::string& name, std::size_t channels,
              const BatchNormOptions& options = {})
      : BatchNorm2d(parent, name, channels, options, 2, 3) {}
};

/// Parameters `name`.weight, initialized to 1, and `name`.bias, to 0. Errc::invalid_argument if the channels
/// do not divide into the groups.
struct GroupNorm : Module {
  GroupNorm(Module& parent, const std::string& name, std::size_t groups, std::size_t channels,
            float epsilon = 1e-5f);
  Var operator()(Tape&, Var x);

  std::size_t groups;
  float epsilon;
  Parameter weight, bias;
};

}  // namespace rz::nn
