#include "sharding/optimizer.h"

#include <cmath>
#include <vector>

#include "comm/core/error.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer.h"

namespace rz {

namespace {

constexpr std::size_t grain = 4096;  // elements: below it a thread is not worth waking

void require_not_negative(const char* rule, const char* option, double value) {
  require(value >= 0, Errc::invalid_argument, rule, ": ", option, " = ", value, " must not be negative");
}

/// The same spans for one launch on a device; the caller's gradients are f32.
std::vector<ops::UpdateRun> runs_of(std::span<const UpdateSpan> spans) {
  std::vector<ops::UpdateRun> runs;
  for (const UpdateSpan& s : spans)
    runs.push_back({.value = s.value,
                    .gradient = s.gradient,
                    .gradient_dtype = DType::f32,
                    .state0 = s.state[0],
                    .state1 = s.state[1],
                    .count = s.count,
                    .decay = s.decay});
  return runs;
}

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const SgdOptions& o) : Optimizer(o.learning_rate), o_(o) {
    require_not_negative("sgd", "learning_rate", o.learning_rate);
    require_not_negative("sgd", "momentum", o.momentum);
    require_not_negative("sgd", "weight_decay", o.weight_decay);
    require(!o.nesterov || o.momentum > 0, Errc::invalid_argument,
            "sgd: nesterov needs a momentum above 0; set momentum, e.g. 0.9");
  }

  const char* name() const override { return "sgd"; }
  int state_count() const override { return o_.momentum > 0 ? 1 : 0; }

  void update(std::span<const UpdateSpan> spans, float grad_scale, const Stream& stream) const override {
    kernels::SgdStep step;
    step.lr = static_cast<float>(learning_rate());
    step.momentum = static_cast<float>(o_.momentum);
    step.nesterov = o_.nesterov;
    step.grad_scale = grad_scale;  // `first` stays false: momenta start from zeros
    if (stream.device().kind == Device::cuda) {
      step.weight_decay = static_cast<float>(o_.weight_decay);
      return ops::device_ops().optimizer.sgd(runs_of(spans), step, {}, stream);
    }
    for (const UpdateSpan& s : spans) {
      step.weight_decay = static_cast<float>(s.decay ? o_.weight_decay : 0);
      stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
        float* const momentum = s.state[0] ? s.state[0] + begin : nullptr;
        kernels::sgd_momentum(s.value + begin, s.gradient + begin, momentum, end - begin, step);
      });
    }
  }

 private:
  const SgdOptions o_;
};

class Adam final : public Optimizer {
 public:
  enum class Decay { l2, decoupled };

  Adam(const AdamOptions& o, Decay decay) : Optimizer(o.learning_rate), o_(o), decay_(decay) {
    require_not_negative(name(), "learning_rate", o.learning_rate);
    require_not_negative(name(), "weight_decay", o.weight_decay);
    require_not_negative(name(), "epsilon", o.epsilon);
    require_moment("beta1", o.beta1);
    require_moment("beta2", o.beta2);
  }

  const char* name() const override { return decay_ == Decay::l2 ? "adam" : "adamw"; }
  int state_count() const override { return 2; }

  void update(std::span<const UpdateSpan> spans, float grad_scale, const Stream& stream) const override {
    const auto t = static_cast<double>(updates());
    kernels::AdamStep step;
    step.lr = learning_rate();
    step.beta1 = o_.beta1, step.beta2 = o_.beta2;
    step.eps = static_cast<float>(o_.epsilon);
    step.bias_correction1 = 1 - std::pow(o_.beta1, t);
    step.bias_correction2_sqrt = std::sqrt(1 - std::pow(o_.beta2, t));
    step.grad_scale = grad_scale;
    if (stream.device().kind == Device::cuda) {
      step.weight_decay = static_cast<float>(o_.weight_decay);
      return ops::device_ops().optimizer.adam(runs_of(spans), step, decay_ == Decay::decoupled, {}, stream);
    }
    const auto kernel = decay_ == Decay::decoupled ? kernels::adamw : kernels::adam;
    for (const UpdateSpan& s : spans) {
      step.weight_decay = static_cast<float>(s.decay ? o_.weight_decay : 0);
      stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
        kernel(s.value + begin, s.gradient + begin, s.state[0] + begin, s.state[1] + begin, end - begin,
               step);
      });
    }
  }

 private:
  void require_moment(const char* option, double beta) const {
    require(beta >= 0 && beta < 1, Errc::invalid_argument, name(), ": ", option, " = ", beta,
            " must lie in [0, 1)");
  }

  const AdamOptions o_;
  const Decay decay_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const SgdOptions& o) { return std::make_unique<Sgd>(o); }
std::unique_ptr<Optimizer> make_adam(const AdamOptions& o) {
  return std::make_unique<Adam>(o, Adam::Decay::l2);
}
std::unique_ptr<Optimizer> make_adamw(const AdamOptions& o) {
  return std::make_unique<Adam>(o, Adam::Decay::decoupled);
}

}  // namespace rz
