#pragma once
/// Hyperparameters of one optimizer step.

namespace rz::kernels {

/// Adam (Kingma and Ba, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, arXiv:1711.05101) as in
/// torch.optim.
struct AdamStep {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  float eps = 1e-8f;
  float weight_decay = 0;
  double bias_correction1 = 1;       ///< 1 - beta1^t
  double bias_correction2_sqrt = 1;  ///< √(1 - beta2^t)
  float grad_scale = 1;              ///< g is multiplied by it first
};

struct SgdStep {
  float lr = 1e-3f;
  float momentum = 0;
  float weight_decay = 0;
  bool nesterov = false;
  bool first = false;  ///< first step of this parameter: buf = g
  float grad_scale = 1;
};
}  // namespace rz::kernels
