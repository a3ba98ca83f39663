#include "sharding/optimizer.h"

#include <cmath>

#include "comm/core/error.h"

namespace rz {

namespace {

constexpr std::size_t grain = 4096;  // elements: below it a thread is not worth waking

void require_not_negative(const char* rule, const char* option, double value) {
  require(value >= 0, Errc::invalid_argument, rule, ": ", option, " = ", value, " must not be negative");
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

  void update(const UpdateSpan& s, float grad_scale, const Stream& stream) const override {
    const auto rate = static_cast<float>(learning_rate());
    const auto momentum = static_cast<float>(o_.momentum);
    const auto decay = static_cast<float>(s.decay ? o_.weight_decay : 0);
    float* const p = s.value;
    float* const m = s.state[0];
    stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        float g = s.gradient[i] * grad_scale + decay * p[i];
        if (m) {
          m[i] = momentum * m[i] + g;
          g = o_.nesterov ? g + momentum * m[i] : m[i];
        }
        p[i] -= rate * g;
      }
    });
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
    for (const double beta : {o.beta1, o.beta2})
      require(beta >= 0 && beta < 1, Errc::invalid_argument, name(), ": beta = ", beta,
              " must lie in [0, 1)");
  }

  const char* name() const override { return decay_ == Decay::l2 ? "adam" : "adamw"; }
  int state_count() const override { return 2; }

  void update(const UpdateSpan& s, float grad_scale, const Stream& stream) const override {
    const auto t = static_cast<double>(updates());
    const double decay = s.decay ? o_.weight_decay : 0;
    const auto rate = static_cast<float>(learning_rate() / (1 - std::pow(o_.beta1, t)));
    const auto inverse_correction2 = static_cast<float>(1 / std::sqrt(1 - std::pow(o_.beta2, t)));
    const auto keep = static_cast<float>(decay_ == Decay::decoupled ? 1 - learning_rate() * decay : 1);
    const auto l2 = static_cast<float>(decay_ == Decay::l2 ? decay : 0);
    const auto beta1 = static_cast<float>(o_.beta1), beta2 = static_cast<float>(o_.beta2);
    const auto rest1 = static_cast<float>(1 - o_.beta1), rest2 = static_cast<float>(1 - o_.beta2);
    const auto epsilon = static_cast<float>(o_.epsilon);
    float* const p = s.value;
    float* const m = s.state[0];
    float* const v = s.state[1];
    stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        const float g = s.gradient[i] * grad_scale + l2 * p[i];
        m[i] = beta1 * m[i] + rest1 * g;
        v[i] = beta2 * v[i] + rest2 * g * g;
        p[i] = p[i] * keep - rate * m[i] / (std::sqrt(v[i]) * inverse_correction2 + epsilon);
      }
    });
  }

 private:
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
