#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>

#include "sharding/optim/grad_norm.h"
#include "sharding/optim/optimizer_rules.h"
#include "sharding/optim/optimizers.h"

namespace rz {

namespace {

void check_lamb(const LambOptions& o) {
  require_not_negative("lamb", "learning_rate", o.learning_rate);
  require_not_negative("lamb", "weight_decay", o.weight_decay);
  require_not_negative("lamb", "min_coeff", o.min_coeff);
  require_moment("lamb", "beta1", o.beta1);
  require_moment("lamb", "beta2", o.beta2);
  require_finite("lamb", "epsilon", o.epsilon);
  require(o.epsilon > 0, Errc::invalid_argument, "lamb: epsilon = ", o.epsilon, " must be above 0");
  require(o.max_coeff >= o.min_coeff, Errc::invalid_argument, "lamb: max_coeff = ", o.max_coeff,
          " must not be below min_coeff = ", o.min_coeff);
}

class Lamb final : public GroupedOptimizer<LambOptions> {
 public:
  explicit Lamb(const ParameterGroups<LambOptions>& groups) : GroupedOptimizer(groups) {
    for (const auto& g : groups.list) check_lamb(g.options);
  }

  const char* name() const override { return "lamb"; }
  std::vector<StateSpec> states(int) const override { return {{.name = "exp_avg"}, {.name = "exp_avg_sq"}}; }
  Grain grain(int) const override { return Grain::parameter; }
  std::vector<std::byte> constants(std::int64_t missed) const override {
    return bytes_of(all_factors({.missed = missed}));
  }

  void measure(std::span<const UpdateSpan> spans, const UpdateScale& scale, const NormSums& sums,
               const Stream& stream) const override {
    if (stream.device().kind == Device::cuda) {
      const auto moments = [&](auto runs, auto rules, const ops::StepInputs& inputs, const Stream& s) {
        ops::device_ops().optimizer.lamb_moments(runs, rules, inputs, sums.on_device, s);
      };
      return update_on_device(spans, moments, all_factors(scale), scale, stream);
    }
    for (const UpdateSpan& s : spans) {
      const auto first = 2 * static_cast<std::size_t>(s.member);
      add_squares_of(s, factors(s.group, scale), sums.on_host[first], sums.on_host[first + 1], stream);
    }
  }

  void update(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    if (stream.device().kind == Device::cuda)
      return update_on_device(spans, ops::device_ops().optimizer.lamb, all_factors(scale), scale, stream);
    for (const UpdateSpan& s : spans) {
      kernels::LambFactors f = factors(s.group, scale);
      const SquaredNorms& norms = scale.norms[static_cast<std::size_t>(s.member)];
      f.rate *= kernels::trust_ratio(f, norms.values, norms.updates);
      update_on_host(
          {&s, 1}, kernels::lamb, [&](int) { return f; }, stream);
    }
  }

 protected:
  std::string describe_group(int group) const override {
    const LambOptions& o = options(group);
    return concat("learning_rate ", all_digits(learning_rate(group)), ", beta1 ", all_digits(o.beta1),
                  ", beta2 ", all_digits(o.beta2), ", epsilon ", all_digits(o.epsilon),
                  o.eps_inside_sqrt ? " (inside the root)" : "", ", weight_decay ",
                  all_digits(o.weight_decay), ", coefficients ", all_digits(o.min_coeff), " to ",
                  all_digits(o.max_coeff), o.bias_correction ? "" : ", no bias_correction");
  }

 private:
  kernels::LambFactors factors(int group, const UpdateScale& scale) const {
    const LambOptions& o = options(group);
    const auto t = static_cast<double>(updates() - scale.missed);
    double rate = learning_rate(group);
    if (o.bias_correction) rate *= std::sqrt(1 - std::pow(o.beta2, t)) / (1 - std::pow(o.beta1, t));
    return {.beta1 = static_cast<float>(o.beta1),
            .rest1 = static_cast<float>(1 - o.beta1),
            .beta2 = static_cast<float>(o.beta2),
            .rest2 = static_cast<float>(1 - o.beta2),
            .eps = static_cast<float>(o.epsilon),
            .weight_decay = static_cast<float>(o.weight_decay),
            .rate = static_cast<float>(rate),
            .scale = scale.factor,
            .min_coeff = static_cast<float>(o.min_coeff),
            .max_coeff = static_cast<float>(o.max_coeff),
            .eps_inside_sqrt = o.eps_inside_sqrt};
  }
  std::vector<kernels::LambFactors> all_factors(const UpdateScale& scale) const {
    std::vector<kernels::LambFactors> all;
    for (int g = 0; g < groups(); ++g) all.push_back(factors(g, scale));
    return all;
  }

  /// Each thread has its own sums. They are exact, so the order in which they are added does not matter.
  static void add_squares_of(const UpdateSpan& span, const kernels::LambFactors& f, ExactSum& values,
                             ExactSum& updates, const Stream& stream) {
    constexpr std::size_t chunk = 32 * norm_block;
    std::mutex joining;
    const kernels::UpdateRun run = run_of(span);
    stream.parallel_for(span.count, host_grain, [&](std::size_t begin, std::size_t end) {
      ExactSum own[2];
      std::array<double, 2 * chunk / norm_block> squares;
      for (std::size_t at = begin; at < end; at += chunk) {
        const std::size_t n = std::min(chunk, end - at);
        kernels::lamb_moments(kernels::part_of(run, at, at + n), f, squares.data());
        for (std::size_t i = 0; i < 2 * n / norm_block; ++i) own[i % 2].add(squares[i]);
      }
      const std::lock_guard lock(joining);
      values.add(own[0]), updates.add(own[1]);
    });
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_lamb(const LambOptions& o) { return make_lamb(all_parameters(o)); }
std::unique_ptr<Optimizer> make_lamb(const ParameterGroups<LambOptions>& groups) {
  return std::make_unique<Lamb>(groups);
}

}  // namespace rz
