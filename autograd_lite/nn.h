#pragma once
/// Layers: named parameters and the operators that use them. A new layer's parameters have no memory;
/// allocate_parameters() or a strategy allocates it. Do not move a layer after append_parameters(), which
/// stores pointers to its parameters.

#include <string>
#include <vector>

#include "autograd_lite/ops.h"

namespace rz::nn {

/// Parameters `name`.weight and `name`.bias, initialized like PyTorch's nn.Linear: uniform in ±1/sqrt(in).
struct Linear {
  Linear(const std::string& name, std::size_t in, std::size_t out, WeightLayout layout = WeightLayout::out_in,
         bool with_bias = true);
  Var operator()(Tape&, Var x);
  /// linear_gelu(): the layer followed by a GELU, as the input of the next Linear.
  Activation gelu(Tape&, Var x);
  Var operator()(Tape&, const Activation& x);
  void append_parameters(std::vector<Parameter*>& to);

  WeightLayout layout;
  bool with_bias;
  Parameter weight, bias;
};

/// Parameters `name`.weight, initialized to 1, and `name`.bias, to 0.
struct LayerNorm {
  LayerNorm(const std::string& name, std::size_t channels, float epsilon);
  Var operator()(Tape&, Var x);
  /// add_layer_norm(): a + b, and its layer norm.
  SumAndNorm add_and_norm(Tape&, Var a, Var b);
  void append_parameters(std::vector<Parameter*>& to);

  float epsilon;
  Parameter weight, bias;
};

/// Parameter `name`.weight [rows, channels], initialized to normal(0, deviation).
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
