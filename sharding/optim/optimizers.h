#pragma once
/// The optimizers and their options.
///
/// A function with options makes one group of all parameters; one with ParameterGroups gives each group its
/// own options. Errc::invalid_argument names the option that is out of range: every number must be finite in
/// f32, in which updates are computed.
///
/// `maximize`: the gradient is negated first, as in PyTorch, so that updates increase the loss.

#include <memory>
#include <string>

#include "optimizer.h"

namespace rz {

/// torch.optim.SGD: g += weight_decay · p; m = momentum · m + (1 - dampening) · g, at the first update m = g;
/// p -= lr · m (nesterov: lr · (g + momentum · m)). State "momentum_buffer", none if momentum is 0.
struct SgdOptions {
  double learning_rate = 1e-3, momentum = 0, weight_decay = 0;
  bool nesterov = false;  ///< needs a momentum above 0, and no dampening
  double dampening = 0;
  bool maximize = false;
};
std::unique_ptr<Optimizer> make_sgd(const SgdOptions&);
std::unique_ptr<Optimizer> make_sgd(const ParameterGroups<SgdOptions>&);

/// Kingma and Ba, arXiv:1412.6980, with the epsilon of PyTorch: p -= lr / (1 - beta1^t) · m / (sqrt(v) /
/// sqrt(1 - beta2^t) + epsilon). States "exp_avg", "exp_avg_sq". With amsgrad the running maximum of v takes
/// the place of v in the last step (Reddi, Kale and Kumar, arXiv:1904.09237), as in torch.optim; it is the
/// state "max_exp_avg_sq".
struct AdamOptions {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  bool bias_correction = true;  ///< false: without the powers of beta
  bool amsgrad = false;
  bool maximize = false;
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
  double learning_rate = 1e-3, beta1 = 0.9;
  double beta2 = 0.999;  ///< DeepSpeed's default; the paper's is 0.99
  double weight_decay = 0;
};
std::unique_ptr<Optimizer> make_lion(const LionOptions&);
std::unique_ptr<Optimizer> make_lion(const ParameterGroups<LionOptions>&);

/// torch.optim.Adagrad (Duchi et al., JMLR 12, 2011): g += weight_decay · p; s += g²; p -= lr / (1 + (t - 1)
/// · lr_decay) · g / (sqrt(s) + epsilon). State "sum".
struct AdagradOptions {
  double learning_rate = 1e-2, epsilon = 1e-10, weight_decay = 0, lr_decay = 0;
  double initial_accumulator = 0;  ///< s before the first update
  bool maximize = false;
};
std::unique_ptr<Optimizer> make_adagrad(const AdagradOptions&);
std::unique_ptr<Optimizer> make_adagrad(const ParameterGroups<AdagradOptions>&);

/// torch.optim.RMSprop (Hinton, lecture 6e of "Neural Networks for Machine Learning"): g += weight_decay · p;
/// s = alpha · s + (1 - alpha) · g²; u = g / (sqrt(s) + epsilon); p -= lr · u, with momentum b = momentum · b
/// + u and p -= lr · b. `centered`: a = alpha · a + (1 - alpha) · g, and s - a² takes the place of s in u; it
/// is 0 where rounding makes it negative, which is NaN in PyTorch. States "square_avg", "grad_avg" if
/// centered, "momentum_buffer" with a momentum above 0.
struct RmspropOptions {
  double learning_rate = 1e-2, alpha = 0.99, epsilon = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false;
  bool maximize = false;
};
std::unique_ptr<Optimizer> make_rmsprop(const RmspropOptions&);
std::unique_ptr<Optimizer> make_rmsprop(const ParameterGroups<RmspropOptions>&);

/// LAMB (You et al., arXiv:1904.00962) as DeepSpeed's FusedLamb: m and v as in Adam; u = m / (sqrt(v) +
/// epsilon) + weight_decay · p; p -= lr · sqrt(1 - beta2^t) / (1 - beta1^t) · trust · u. The trust ratio of a
/// parameter is |p| / |u|, limited to [min_coeff, max_coeff], or 1 if a norm is 0. Both norms are of the
/// whole parameter and exact except for the rounding of the squares, so all strategies produce the same bits;
/// on several ranks that shard the state they are one all_reduce of 1120 bytes per parameter and update.
/// States "exp_avg", "exp_avg_sq".
struct LambOptions {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999;
  double epsilon = 1e-8;  ///< above 0
  double weight_decay = 0;
  double max_coeff = 10, min_coeff = 0.01;  ///< max_coeff may be infinite
  bool bias_correction = true;
  bool eps_inside_sqrt = false;  ///< m / sqrt(v + epsilon)
};
std::unique_ptr<Optimizer> make_lamb(const LambOptions&);
std::unique_ptr<Optimizer> make_lamb(const ParameterGroups<LambOptions>&);

/// Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) for matrices, AdamW for the rest, as
/// DeepSpeed: m = momentum · m + (1 - momentum) · g; d = (1 - momentum) · g + momentum · m (without nesterov:
/// m); p = (1 - lr · weight_decay) · p - lr · sqrt(max(1, rows / columns)) · O(d). O(d) is newton_schulz() in
/// f32, where DeepSpeed computes in 16 bits. State "momentum_buffer".
///
/// Each matrix has one owner, a rank that sees it whole, so all strategies produce the same bits for the same
/// number of threads. Cost of an update with Ψ elements in matrices on N ranks: each rank receives 4Ψ bytes
/// of results (a broadcast per matrix), and 4Ψ bytes of directions if the state is sharded (an all_gather
/// per bucket); it holds 4Ψ/N bytes for the matrices that it owns and one f32 bucket; and it computes about
/// 1/N of the products, ns_steps · (2r²c + r³) multiply-adds for r rows and c >= r columns. On the host.
struct MuonOptions {
  double learning_rate = 0.02, momentum = 0.95, weight_decay = 0;
  bool nesterov = true;
  int ns_steps = 5;  ///< iterations of newton_schulz()
};
/// DeepSpeed's choice: two or more dimensions, and neither "embed" nor "lm_head" in the name, in any case.
/// Hugging Face's GPT-2 names its embeddings "wte" and "wpe", which are therefore matrices.
bool is_muon_matrix(const Parameter&);
/// DeepSpeed's options of AdamW for the rest, which may not maximize; learning_rate is its "adam_lr", that of
/// MuonOptions "muon_lr".
inline constexpr AdamOptions muon_adam_options{
    .learning_rate = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-10};
/// Groups "muon" and "adam". Errc::invalid_argument at the first update names a matrix that has not two
/// dimensions.
std::unique_ptr<Optimizer> make_muon(const MuonOptions&, const AdamOptions& rest = muon_adam_options,
                                     ParameterFilter matrices = is_muon_matrix);
/// The groups of matrices are tried first.
std::unique_ptr<Optimizer> make_muon(const ParameterGroups<MuonOptions>& matrices,
                                     const ParameterGroups<AdamOptions>& rest);

}  // namespace rz
