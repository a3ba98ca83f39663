#pragma once
/// The optimizers and their options.
///
/// A function with options makes one group of all parameters; one with ParameterGroups gives each group its
/// own options. Errc::invalid_argument names the option that is out of range.

#include <memory>

#include "sharding/optim/optimizer.h"

namespace rz {

/// torch.optim.SGD: g += weight_decay · p; m = momentum · m + (1 - dampening) · g, at the first update m = g;
/// p -= lr · m (nesterov: lr · (g + momentum · m)). State "momentum_buffer", none if momentum is 0.
struct SgdOptions {
  double learning_rate = 1e-3, momentum = 0, weight_decay = 0;
  bool nesterov = false;  ///< needs a momentum above 0, and no dampening
  double dampening = 0;
};
std::unique_ptr<Optimizer> make_sgd(const SgdOptions&);
std::unique_ptr<Optimizer> make_sgd(const ParameterGroups<SgdOptions>&);

/// Kingma and Ba, arXiv:1412.6980, with the epsilon of PyTorch: p -= lr / (1 - beta1^t) · m / (sqrt(v) /
/// sqrt(1 - beta2^t) + epsilon). States "exp_avg", "exp_avg_sq".
struct AdamOptions {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  bool bias_correction = true;  ///< false: without the powers of beta
};
/// Weight decay is added to the gradient (L2): "adam_w_mode": false in DeepSpeed.
std::unique_ptr<Optimizer> make_adam(const AdamOptions&);
std::unique_ptr<Optimizer> make_adam(const ParameterGroups<AdamOptions>&);
/// Weight decay is decoupled: p *= 1 - lr · weight_decay first (Loshchilov and Hutter, arXiv:1711.05101).
std::unique_ptr<Optimizer> make_adamw(const AdamOptions&);
std::unique_ptr<Optimizer> make_adamw(const ParameterGroups<AdamOptions>&);

/// Lion (Chen et al., arXiv:2302.06675): p = (1 - lr · weight_decay) · p - lr · sign(beta1 · m + (1 - beta1)
/// · g); m = beta2 · m + (1 - beta2) · g. As in the paper the sign of 0 is 0; in DeepSpeed it is 1 or -1, so
/// that weights without gradient move. State "exp_avg".
struct LionOptions {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
};
std::unique_ptr<Optimizer> make_lion(const LionOptions&);
std::unique_ptr<Optimizer> make_lion(const ParameterGroups<LionOptions>&);

/// torch.optim.Adagrad (Duchi et al., JMLR 12, 2011): g += weight_decay · p; s += g²; p -= lr / (1 + (t - 1)
/// · lr_decay) · g / (sqrt(s) + epsilon). State "sum".
struct AdagradOptions {
  double learning_rate = 1e-2, epsilon = 1e-10, weight_decay = 0, lr_decay = 0;
  double initial_accumulator = 0;  ///< s before the first update
};
std::unique_ptr<Optimizer> make_adagrad(const AdagradOptions&);
std::unique_ptr<Optimizer> make_adagrad(const ParameterGroups<AdagradOptions>&);

}  // namespace rz
