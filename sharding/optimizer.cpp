#include "sharding/optimizer.h"

#include <cmath>

#include "comm/core/error.h"
#include "sharding/update_kernels.h"

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
    const kernels::SgdFactors f{static_cast<float>(learning_rate()), static_cast<float>(o_.momentum),
                                static_cast<float>(s.decay ? o_.weight_decay : 0), grad_scale, o_.nesterov};
    stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
      kernels::sgd(s.value + begin, s.gradient + begin, s.state[0] ? s.state[0] + begin : nullptr,
                   end - begin, f);
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
    require_moment("beta1", o.beta1);
    require_moment("beta2", o.beta2);
  }

  const char* name() const override { return decay_ == Decay::l2 ? "adam" : "adamw"; }
  int state_count() const override { return 2; }

  void update(const UpdateSpan& s, float grad_scale, const Stream& stream) const override {
    const auto t = static_cast<double>(updates());
    const double decay = s.decay ? o_.weight_decay : 0;
    const bool decoupled = decay_ == Decay::decoupled;
    kernels::AdamFactors f;
    f.rate = static_cast<float>(learning_rate() / (1 - std::pow(o_.beta1, t)));
    f.inverse_correction2 = static_cast<float>(1 / std::sqrt(1 - std::pow(o_.beta2, t)));
    f.beta1 = static_cast<float>(o_.beta1), f.rest1 = static_cast<float>(1 - o_.beta1);
    f.beta2 = static_cast<float>(o_.beta2), f.rest2 = static_cast<float>(1 - o_.beta2);
    f.epsilon = static_cast<float>(o_.epsilon);
    f.keep = static_cast<float>(decoupled ? 1 - learning_rate() * decay : 1);
    f.l2 = static_cast<float>(decoupled ? 0 : decay);
    f.grad_scale = grad_scale;
    stream.parallel_for(s.count, grain, [&](std::size_t begin, std::size_t end) {
      kernels::adam(s.value + begin, s.gradient + begin, s.state[0] + begin, s.state[1] + begin, end - begin,
                    f);
    });
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
