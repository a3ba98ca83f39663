#include "sharding/optim/optimizer.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "comm/core/error.h"
#include "tensor/kernels/adam_factors.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer.h"

namespace rz {

namespace {

constexpr std::size_t grain = 4096;  // elements per thread; waking another thread for fewer does not pay

void require_not_negative(const char* rule, const char* option, double value) {
  require(value >= 0, Errc::invalid_argument, rule, ": ", option, " = ", value, " must not be negative");
}

/// Decimal text that parses to the same number.
std::string all_digits(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", x);
  return text;
}

ops::StepInputs inputs_of(const UpdateScale& scale) {
  ops::StepInputs inputs{.rule = scale.constants};
  if (scale.device_outcome)
    inputs.grad_scale = &scale.device_outcome->grad_scale, inputs.skip = &scale.device_outcome->skip;
  return inputs;
}

template <class T>
std::vector<std::byte> bytes_of(const T& x) {
  const auto bytes = std::as_bytes(std::span(&x, 1));
  return {bytes.begin(), bytes.end()};
}

/// For updates on the host.
const float* gradient_of(const UpdateSpan& s) {
  require(s.gradient_dtype == DType::f32 && !s.working, Errc::unsupported,
          "updates on the host are of f32 values by f32 gradients; mixed precision needs a CUDA device");
  return static_cast<const float*>(s.gradient);
}

/// The spans as runs of one device launch.
std::vector<ops::UpdateRun> runs_of(std::span<const UpdateSpan> spans) {
  std::vector<ops::UpdateRun> runs;
  for (const UpdateSpan& s : spans)
    runs.push_back({.value = s.value,
                    .gradient = s.gradient,
                    .gradient_dtype = s.gradient_dtype,
                    .working = s.working,
                    .working_dtype = s.working_dtype,
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
  std::string describe() const override {
    return concat("sgd, learning_rate ", all_digits(learning_rate()), ", momentum ", all_digits(o_.momentum),
                  o_.nesterov ? " (nesterov)" : "", ", weight_decay ", all_digits(o_.weight_decay));
  }
  int state_count() const override { return o_.momentum > 0 ? 1 : 0; }

  std::vector<std::byte> constants(std::int64_t) const override { return bytes_of(step_now(1)); }

  void update(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    kernels::SgdStep step = step_now(scale.factor);
    if (stream.device().kind == Device::cuda)
      return ops::device_ops().optimizer.sgd(runs_of(spans), step, inputs_of(scale), stream);
    for (const UpdateSpan& s : spans) {
      step.weight_decay = static_cast<float>(s.decay ? o_.weight_decay : 0);
      const float* const gradient = gradient_of(s);
      stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
        float* const momentum = s.state[0] ? s.state[0] + begin : nullptr;
        kernels::sgd_momentum(s.value + begin, gradient + begin, momentum, end - begin, step);
      });
    }
  }

 private:
  kernels::SgdStep step_now(float grad_scale) const {
    kernels::SgdStep step;
    step.lr = static_cast<float>(learning_rate());
    step.momentum = static_cast<float>(o_.momentum);
    step.weight_decay = static_cast<float>(o_.weight_decay);
    step.nesterov = o_.nesterov;
    step.grad_scale = grad_scale;  // `first` stays false: the momentum starts from zeros
    return step;
  }

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
  std::string describe() const override {
    return concat(name(), ", learning_rate ", all_digits(learning_rate()), ", beta1 ", all_digits(o_.beta1),
                  ", beta2 ", all_digits(o_.beta2), ", epsilon ", all_digits(o_.epsilon), ", weight_decay ",
                  all_digits(o_.weight_decay));
  }
  int state_count() const override { return 2; }

  std::vector<std::byte> constants(std::int64_t missed) const override {
    return bytes_of(kernels::adam_rule(step_now(1, missed), decoupled()));
  }

  void update(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    kernels::AdamStep step = step_now(scale.factor, scale.missed);
    if (stream.device().kind == Device::cuda)
      return ops::device_ops().optimizer.adam(runs_of(spans), step, decoupled(), inputs_of(scale), stream);
    const auto kernel = decoupled() ? kernels::adamw : kernels::adam;
    for (const UpdateSpan& s : spans) {
      step.weight_decay = static_cast<float>(s.decay ? o_.weight_decay : 0);
      const float* const gradient = gradient_of(s);
      stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
        kernel(s.value + begin, gradient + begin, s.state[0] + begin, s.state[1] + begin, end - begin, step);
      });
    }
  }

 private:
  void require_moment(const char* option, double beta) const {
    require(beta >= 0 && beta < 1, Errc::invalid_argument, name(), ": ", option, " = ", beta,
            " must lie in [0, 1)");
  }

  bool decoupled() const { return decay_ == Decay::decoupled; }

  kernels::AdamStep step_now(float grad_scale, std::int64_t missed) const {
    const auto t = static_cast<double>(updates() - missed);
    kernels::AdamStep step;
    step.lr = learning_rate();
    step.beta1 = o_.beta1, step.beta2 = o_.beta2;
    step.eps = static_cast<float>(o_.epsilon);
    step.weight_decay = static_cast<float>(o_.weight_decay);
    step.bias_correction1 = 1 - std::pow(o_.beta1, t);
    step.bias_correction2_sqrt = std::sqrt(1 - std::pow(o_.beta2, t));
    step.grad_scale = grad_scale;
    return step;
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
