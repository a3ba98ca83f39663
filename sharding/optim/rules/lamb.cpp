#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>

#include "sharding/optim/optimizers.h"
#include "sharding/optim/rules/grouped_optimizer.h"
#include "sharding/optim/rules/option_checks.h"
#include "sharding/optim/rules/update_elements.h"

namespace rz {

namespace {

void check_lamb(const LambOptions& o) {
  require_not_negative("lamb", "learning_rate", o.learning_rate);
  require_not_negative("lamb", "weight_decay", o.weight_decay);
  require_not_negative("lamb", "min_coeff", o.min_coeff);
  require_moment("lamb", "beta1", o.beta1);
  require_moment("lamb", "beta2", o.beta2);
  require(o.epsilon > 0, Errc::invalid_argument, "lamb: epsilon = ", o.epsilon, " must be above 0");
  require(o.max_coeff >= o.min_coeff, Errc::invalid_argument, "lamb: max_coeff = ", o.max_coeff,
          " must not be below min_coeff = ", o.min_coeff);
}

double trust_ratio(const LambOptions& o, const SquaredNorms& norms) {
  if (norms.values == 0 || norms.updates == 0) return 1;
  const double ratio = std::sqrt(norms.values) / std::sqrt(norms.updates);
  return ratio > o.max_coeff ? o.max_coeff : ratio < o.min_coeff ? o.min_coeff : ratio;
}

class Lamb final : public GroupedOptimizer<LambOptions> {
 public:
  explicit Lamb(const ParameterGroups<LambOptions>& groups) : GroupedOptimizer(groups) {
    for (const auto& g : groups.list) check_lamb(g.options);
  }

  const char* name() const override { return "lamb"; }
  std::vector<StateSpec> states(int) const override { return {{.name = "exp_avg"}, {.name = "exp_avg_sq"}}; }
  Grain grain(int) const override { return Grain::parameter; }
  std::vector<std::byte> constants(std::int64_t) const override { fail_on_device(); }

  void measure(std::span<const UpdateSpan> spans, const UpdateScale& scale, std::span<ExactSum> sums,
               const Stream& stream) const override {
    if (stream.device().kind == Device::cuda) fail_on_device();
    for (const UpdateSpan& s : spans) {
      const auto first = 2 * static_cast<std::size_t>(s.member);
      add_squares_of(s, factors(s.group, scale, 1), sums[first], sums[first + 1], stream);
    }
  }

  void update(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    if (stream.device().kind == Device::cuda) fail_on_device();
    for (const UpdateSpan& s : spans) {
      const double trust = trust_ratio(options(s.group), scale.norms[static_cast<std::size_t>(s.member)]);
      update_on_host(
          {&s, 1}, kernels::lamb, [&](int group) { return factors(group, scale, trust); }, stream);
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
  [[noreturn]] static void fail_on_device() {
    fail(Errc::unsupported, "lamb runs on the host; on a CUDA device choose another optimizer");
  }

  kernels::LambFactors factors(int group, const UpdateScale& scale, double trust) const {
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
            .rate = static_cast<float>(rate * trust),
            .scale = scale.factor,
            .eps_inside_sqrt = o.eps_inside_sqrt};
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
