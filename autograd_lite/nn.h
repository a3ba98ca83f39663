#pragma once
/// Layers: named parameters and the operator that uses them. Their parameters have no memory until somebody
/// gives it to them (allocate_parameters, or a strategy). A layer must stay where it is once its parameters
/// were listed.

#include <string>
#include <vector>

#include "autograd_lite/ops.h"

namespace rz::nn {

/// Names are `name`.weight and `name`.bias. Drawn as PyTorch's nn.Linear by default: uniform within
/// 1/sqrt(in).
struct Linear {
  Linear(const std::string& name, std::size_t in, std::size_t out, WeightLayout layout = WeightLayout::out_in,
         bool with_bias = true);
  Var operator()(Tape&, Var x);
  /// With a GELU behind it, which the next layer takes.
  Activation gelu(Tape&, Var x);
  Var operator()(Tape&, const Activation& x);
  void append_parameters(std::vector<Parameter*>& to);

  WeightLayout layout;
  bool with_bias;
  Parameter weight, bias;
};

/// Weight one, bias zero.
struct LayerNorm {
  LayerNorm(const std::string& name, std::size_t channels, float epsilon);
  Var operator()(Tape&, Var x);
  /// Of a + b, which comes too.
  SumAndNorm add_and_norm(Tape&, Var a, Var b);
  void append_parameters(std::vector<Parameter*>& to);

  float epsilon;
  Parameter weight, bias;
};

/// Normal(0, deviation).
struct Embedding {
  Embedding(const std::string& name, std::size_t rows, std::size_t channels, float deviation = 1);
  Var operator()(Tape&, const Tensor& tokens);
  void append_parameters(std::vector<Parameter*>& to);

  Parameter weight;
};

struct Dropout {
  explicit Dropout(float p) : p(p) {}
  Var operator()(Tape& tape, Var x) const { return training ? dropout(tape, x, p) : x; }

  float p;
  bool training = true;
};

}  // namespace rz::nn
