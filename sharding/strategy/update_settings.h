#pragma once
/// Settings of a strategy that may change from update to update.

namespace rz {

struct StepLimits;

/// Constants of the next updates: what losses are multiplied and gradients divided by, and the policy for
/// their norm. All must be equal on all ranks. Strategy::settings() returns it.
class UpdateSettings {
 public:
  /// Options of Strategy::clip_and_step().
  struct Policy {
    double max_norm = 0;         ///< as for Strategy::clip_gradients(); 0: no clipping
    bool skip_overflow = false;  ///< skip the update, on every rank alike, if norm or loss is not finite
  };

  /// Sets the number of terms that the losses of an update are expected to have, over all micro-batches and
  /// ranks; initially 1. The result does not depend on it, except for rounding and the range of 16-bit
  /// gradients. Errc::invalid_argument unless it is positive and finite.
  void set_expected_terms(double);
  /// Sets the factor by which losses are multiplied from now on: by Strategy::backward(), or by the caller of
  /// Tape::backward(). Gradients contain it until norms and updates divide it out. Errc::invalid_argument
  /// unless it is positive and finite.
  void set_loss_scale(double);
  /// The policy of the next replay of a graph that contains clip_and_step(), which sets it otherwise; call
  /// before next_update(). Errc::invalid_argument if max_norm is negative or NaN.
  void set_policy(const Policy&);

  /// Factor in the gradient of a sum over terms. After the mean over `ranks` it is the sum over all ranks,
  /// divided by the expected terms.
  float loss_gradient(int ranks) const;
  /// What norms and updates read.
  StepLimits limits() const;

 private:
  double loss_scale_ = 1, expected_terms_ = 1;
  Policy policy_;
};

}  // namespace rz
