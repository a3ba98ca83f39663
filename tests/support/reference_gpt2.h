#pragma once
/// GPT-2 and AdamW again, in double precision, one thread, nothing shared with the library: the reference of
/// training.

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace rz::test {

struct ReferenceConfig {
  int layers = 0, heads = 0, channels = 0, positions = 0, vocabulary = 0;
  double epsilon = 1e-5;  ///< of the layer norms
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, adam_epsilon = 1e-8, weight_decay = 0, clip = 0;
};

/// Parameters by Hugging Face's names ("transformer.wte.weight", …), embeddings tied.
using ReferenceParameters = std::map<std::string, std::vector<double>>;

class ReferenceGpt2 {
 public:
  ReferenceGpt2(ReferenceConfig, ReferenceParameters);

  /// Mean loss over samples of T + 1 tokens each, and its gradients.
  double forward_backward(std::span<const std::vector<int>> samples);
  struct Update {
    double loss, grad_norm;
  };
  /// One AdamW update; weights of two dimensions decay. Returns the loss and the norm before clipping.
  Update update(std::span<const std::vector<int>> samples);
  /// Changes a parameter by its gradient, which is clipped.
  using Rule = std::function<void(const std::string& name, std::vector<double>& value,
                                  const std::vector<double>& gradient)>;
  /// One update by another rule.
  Update update(std::span<const std::vector<int>> samples, const Rule&);

  const ReferenceParameters& parameters() const { return values_; }
  const ReferenceParameters& gradients() const { return gradients_; }

 private:
  using Matrix = std::vector<double>;
  struct Norm {
    Matrix normal;  ///< before weight and bias
    std::vector<double> inverse_deviation;
  };
  struct Block {
    Norm ln_1, ln_2;
    Matrix a, qkv, probabilities, mixed, b, hidden, activated;
  };

  Matrix norm(const Matrix& x, const std::string& name, Norm& kept) const;
  Matrix norm_backward(const Matrix& d_out, const std::string& name, const Norm& kept);
  Matrix linear(const Matrix& x, const std::string& name, int in, int out) const;
  Matrix linear_backward(const Matrix& d_out, const Matrix& x, const std::string& name, int in, int out);
  Matrix attend(const Matrix& qkv, Matrix& probabilities) const;
  Matrix attend_backward(const Matrix& d_mixed, const Matrix& qkv, const Matrix& probabilities) const;
  Matrix block(const Matrix& x, int layer, Block& kept) const;
  Matrix block_backward(Matrix d_x, int layer, const Block& kept);
  /// The rule of `config`, for update number updates_.
  void adamw(const std::string& name, Matrix& value, const Matrix& gradient);
  /// Adds a sample's gradients, times `factor`; returns its summed loss.
  double sample(const std::vector<int>& tokens, double factor);

  ReferenceConfig config_;
  ReferenceParameters values_, gradients_, first_, second_;
  int tokens_ = 0, updates_ = 0;
};

}  // namespace rz::test
